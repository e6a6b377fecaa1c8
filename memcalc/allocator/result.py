"""What a replay returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from memcalc.allocator.policy import SegmentView


class Moment(NamedTuple):
    """The counters after one event, in bytes."""

    event: int  # its position in the stream; -1 before the first
    allocated: int = 0
    active: int = 0
    requested: int = 0
    reserved: int = 0
    inactive_split: int = 0

    @property
    def unallocated(self) -> int:
        """Reserved but not allocated: what fragmentation and caching cost at this moment."""
        return self.reserved - self.allocated

    @property
    def fragmentation(self) -> float:
        """The share of reserved memory that is not allocated; 0 when nothing is reserved."""
        return self.unallocated / self.reserved if self.reserved else 0.0


@dataclass(frozen=True, slots=True)
class Failure:
    """Where a run dies."""

    event: int  # its position in the stream
    message: str  # as the framework prints it


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What became of a stream of events. Bytes, as torch.cuda.max_memory_allocated and its like show them."""

    peak_allocated: int
    peak_active: int
    peak_reserved: int
    peak_device: int  # of the device's own memory, in its granules, what was used from the start not included
    peak: Moment  # after the event that took allocated memory to its peak, the first time
    widest: Moment  # the same for reserved memory
    end: Moment  # after the last event, or the one before the failure
    failure: Failure | None
    device_allocations: int  # calls that fetched memory from the driver
    device_frees: int  # and that gave some back
    statistics: dict[str, int]  # under the framework's names, at the end
    segments: tuple[SegmentView, ...]  # what is held at the end
    notes: tuple[str, ...] = ()  # settings without effect
    series: tuple[Moment, ...] = ()  # moments along the way, when they were asked for

    @property
    def fits(self) -> bool:
        """Whether the stream ran to its end."""
        return self.failure is None
