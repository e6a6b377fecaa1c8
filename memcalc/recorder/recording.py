"""A recorded run of the step, on any device."""

from __future__ import annotations

from dataclasses import dataclass

from memcalc.events.event import Event


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded run of the step.

    Args:
        device: as in the JSON: "fake:cuda".
        events: the events of device memory.
        parameters: elements of the model's parameters.
        trainable: elements of the trained parameters.
        buffers: elements of the model's buffers.
        readbacks: number of times the host read a data-dependent value, which the run does not compute.
        allocated_bytes: peak of allocated bytes of a real allocator, if there was one.
        reserved_bytes: its peak of reserved bytes.
        has_allocator: whether the device uses PyTorch's caching allocator.
        died: PyTorch's message if the run ran out of memory on the GPU; the events are then of a run without a limit.
        host_events: the events of host memory, if the run offloads and they were recorded.
        notes: further information for the reader, such as the inputs that were made.
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
