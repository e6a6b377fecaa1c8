"""A run of the step that was recorded, on whatever device."""

from __future__ import annotations

from dataclasses import dataclass

from memcalc.events.event import Event


@dataclass(frozen=True, slots=True)
class Recording:
    """A run of the step that was recorded.

    Args:
        device: as the JSON names it: "fake:cuda".
        events: what happened.
        parameters: of the model.
        trainable: those of them that are trained.
        buffers: elements of the model's buffers.
        readbacks: how often the host asked for a value that does not exist.
        allocated_bytes: the most that a real allocator handed out, where there was one.
        reserved_bytes: the most that it held.
        has_allocator: whether the device's memory goes through PyTorch's caching allocator.
        died: PyTorch's message, where the run died on the card; these events are then of one without bounds.
        host_events: what happened in the host's memory, where the run has offloaded something and it was seen.
        notes: what else a reader should know, such as the inputs that were made.
    """

    device: str
    events: tuple[Event, ...]
    parameters: int
    trainable: int
    buffers: int
    readbacks: int = 0
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    has_allocator: bool = True
    died: str | None = None
    host_events: tuple[Event, ...] = ()
    notes: tuple[str, ...] = ()
