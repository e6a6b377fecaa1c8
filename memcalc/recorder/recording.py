"""A recorded run of the step, on any device."""

from __future__ import annotations

from dataclasses import dataclass

from memcalc.events.event import Event


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded run of the step."""

    device: str  # as in the JSON: "fake:cuda"
    events: tuple[Event, ...]  # the events of device memory
    parameters: int  # elements of the model's parameters
    trainable: int  # elements of the trained parameters
    buffers: int  # elements of the model's buffers
    readbacks: int = 0  # number of times the host read a data-dependent value, which the run does not compute
    allocated_bytes: int | None = None  # peak of allocated bytes of a real allocator, if there was one
    reserved_bytes: int | None = None  # its peak of reserved bytes
    has_allocator: bool = True  # whether the device uses PyTorch's caching allocator
    # PyTorch's message if the run ran out of memory on the GPU; the events are then of a run without a limit
    died: str | None = None
    host_events: tuple[Event, ...] = ()  # the events of host memory, if the run offloads and they were recorded
    notes: tuple[str, ...] = ()  # further information for the reader, such as the inputs that were made
