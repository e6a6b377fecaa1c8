"""A replay with an allocation history: the entries of PyTorch's memory history, and the counters after every event.

Source: torch c10/cuda/CUDACachingAllocator.cpp: record_trace, and its callers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from memcalc.allocator.blocks import Block
from memcalc.allocator.driver import Driver
from memcalc.allocator.event_replay import rules, run
from memcalc.allocator.pytorch.caching import CachingAllocator
from memcalc.allocator.pytorch.rounding import block_size
from memcalc.allocator.pytorch.settings import Settings
from memcalc.allocator.pytorch.versions import DEFAULT_VERSION, Version
from memcalc.allocator.result import ReplayResult
from memcalc.allocator.views import SegmentView
from memcalc.errors import OutOfMemory
from memcalc.events.event import Event
from memcalc.progress import EVERY, Progress, silent


class HistoryEntry(NamedTuple):
    """One entry of the history, as in PyTorch's memory snapshots."""

    action: str  # alloc, free_requested, free_completed, segment_alloc, segment_free, segment_map, segment_unmap, oom
    address: int  # -1 if the allocation failed
    size: int  # bytes: requested by the caller; for segments, by the allocator; for an oom, the rounded request
    stream: int
    event: int  # position in the stream of the event that caused it


@dataclass(frozen=True)
class History:
    """A replay with the counters after every event; they end before an event that runs out of memory."""

    events: Sequence[Event]
    result: ReplayResult
    allocated: tuple[int, ...]  # bytes after each event, as torch.cuda.memory_allocated
    reserved: tuple[int, ...]  # as torch.cuda.memory_reserved
    free_bytes: int  # of the device, at the end
    settings: Settings
    version: Version
    capacity: int | None  # bytes of the device; None: it never runs out of memory
    used: int  # bytes of the device in use from the start

    @cached_property
    def entries(self) -> tuple[HistoryEntry, ...]:
        """The entries of PyTorch's memory history. Replays the stream once more."""
        allocator = _HistoryRecorder(self.settings, self.version, Driver(self.capacity, self.used))
        run(self.events, allocator, after_each=allocator.after_event)
        return tuple(allocator.entries)

    def segments_at(self, event: int) -> tuple[SegmentView, ...]:
        """Return the segments after event `event`, sorted by address. Replays the stream up to that event."""
        allocator = CachingAllocator(self.settings, self.version, Driver(self.capacity, self.used))
        return run(self.events, allocator, until=event).segments


class _HistoryRecorder(CachingAllocator):
    """The allocator, recording its history."""

    def __init__(self, settings: Settings, version: Version, driver: Driver) -> None:
        super().__init__(settings, version, driver)
        self.entries: list[HistoryEntry] = []
        self._event = 0
        self.memory.watch = self._note

    def after_event(self) -> None:
        self._event += 1

    def _note(self, action: str, address: int, size: int, stream: int) -> None:
        self.entries.append(HistoryEntry(action, address, size, stream, self._event))

    def malloc(self, size: int, stream: int = 0) -> Block:
        try:
            block = super().malloc(size, stream)
        except OutOfMemory:
            self._note("oom", -1, block_size(size, self.settings.roundup_power2_divisions), stream)
            raise
        self._note("alloc", block.address, size, stream)
        return block

    def free(self, block: Block) -> None:
        self._note("free_requested", block.address, block.requested, block.free_set.stream)
        super().free(block)

    def free_until_completed(self, block: Block) -> None:
        self._note("free_requested", block.address, block.requested, block.free_set.stream)
        super().free_until_completed(block)

    def _free(self, block: Block) -> None:
        self._note("free_completed", block.address, block.requested, block.free_set.stream)
        super()._free(block)


def history(
    events: Iterable[Event],
    config: Settings | str = "",
    version: Version | str = DEFAULT_VERSION,
    capacity: int | None = None,
    *,
    used: int = 0,
    progress: Progress = silent,
) -> History:
    """Replay a stream as `replay` does, and record the counters after every event.

    Args:
        events: as for `replay`, like all other arguments.
        config: as PYTORCH_CUDA_ALLOC_CONF.
        version: the PyTorch version.
        capacity: bytes of the device.
        used: bytes of the device in use from the start.
        progress: called with "allocator" and the number of events replayed.

    Raises:
        InputError: as `replay`.
    """
    version, config = rules(config, version, None)
    driver = Driver(capacity, used)
    allocator = CachingAllocator(config, version, driver)
    events = tuple(events)
    allocated: list[int] = []
    reserved: list[int] = []
    small, large, held = allocator.counters.small, allocator.counters.large, allocator.counters.reserved

    def after_each() -> None:
        allocated.append(small.allocated_now + large.allocated_now)
        reserved.append(held.current)
        done = len(allocated)
        if done % EVERY == 0 or done == len(events):
            progress("allocator", done, len(events))

    result = run(events, allocator, config.notes, after_each=after_each)
    return History(
        events, result, tuple(allocated), tuple(reserved), driver.free_bytes, config, version, capacity, used
    )
