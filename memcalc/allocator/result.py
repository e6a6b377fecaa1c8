"""The result of an allocator replay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from memcalc.allocator.views import SegmentView


class CounterSample(NamedTuple):
    """The counters after one event, in bytes."""

    event: int  # its position in the stream; -1 before the first event
    allocated: int = 0
    active: int = 0
    requested: int = 0
    reserved: int = 0
    inactive_split: int = 0

    @property
    def unallocated(self) -> int:
        """Reserved minus allocated bytes: the cost of fragmentation and caching."""
        return self.reserved - self.allocated


@dataclass(frozen=True, slots=True)
class FailedAllocation:
    """The event at which a run runs out of memory."""

    event: int  # its position in the stream
    message: str  # as the framework prints it


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The result of replaying an event stream. Bytes, as torch.cuda.max_memory_allocated and its like return."""

    peak_allocated: int
    peak_reserved: int
    peak_device: int  # peak device memory in whole granules, without the bytes used from the start
    peak_allocated_sample: CounterSample  # after the first event at the peak of allocated memory
    peak_reserved_sample: CounterSample  # after the first event at the peak of reserved memory
    end: CounterSample  # after the last event, or the last one before the failure
    failure: FailedAllocation | None
    device_allocations: int  # number of driver calls that allocated memory
    device_frees: int  # number of driver calls that freed memory
    statistics: dict[str, int]  # under the framework's names, at the end
    segments: tuple[SegmentView, ...]  # at the end
    notes: tuple[str, ...] = ()  # settings that have no effect

    @property
    def fits(self) -> bool:
        """Whether the stream ran to its end."""
        return self.failure is None
