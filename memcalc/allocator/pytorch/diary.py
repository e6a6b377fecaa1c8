"""A replay with its diary: what PyTorch's own memory history would have noted, and the counters after every event.

Source: torch c10/cuda/CUDACachingAllocator.cpp: record_trace, and where it is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from memcalc.allocator.blocks import Block
from memcalc.allocator.driver import Driver
from memcalc.allocator.playing import rules, run
from memcalc.allocator.policy import SegmentView
from memcalc.allocator.pytorch.caching import CachingAllocator
from memcalc.allocator.pytorch.rounding import block_size
from memcalc.allocator.pytorch.settings import Settings
from memcalc.allocator.pytorch.versions import DEFAULT_VERSION, Version
from memcalc.allocator.result import ReplayResult
from memcalc.errors import OutOfMemory
from memcalc.events.event import Event
from memcalc.progress import EVERY, Progress, silent


class Entry(NamedTuple):
    """One line of the history, in the words of PyTorch's memory snapshots."""

    action: str  # alloc, free_requested, free_completed, segment_alloc, segment_free, segment_map, segment_unmap, oom
    address: int  # -1 where nothing was found
    size: int  # bytes asked for by the caller; of segments those of the driver; of an oom the rounded request
    stream: int
    event: int  # position in the stream of what caused it


@dataclass(frozen=True)
class History:
    """A replay with the counters after every event, which end before a fatal one."""

    events: Sequence[Event]
    result: ReplayResult
    allocated: tuple[int, ...]  # bytes after each event, as torch.cuda.memory_allocated
    reserved: tuple[int, ...]  # as torch.cuda.memory_reserved
    free_bytes: int  # of the device, at the end
    settings: Settings
    version: Version
    capacity: int | None  # bytes of the device; None: it never runs out
    used: int  # of them gone from the start

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """What PyTorch's memory history would have noted. It replays the stream once more."""
        allocator = _Diarist(self.settings, self.version, Driver(self.capacity, self.used))
        run(self.events, allocator, after_each=allocator.after_event)
        return tuple(allocator.entries)

    def segments_at(self, event: int) -> tuple[SegmentView, ...]:
        """What was held of the device after event `event`, by address. It replays the stream up to there."""
        allocator = CachingAllocator(self.settings, self.version, Driver(self.capacity, self.used))
        return run(self.events, allocator, until=event).segments


class _Diarist(CachingAllocator):
    """The allocator, noting what it does."""

    def __init__(self, settings: Settings, version: Version, driver: Driver) -> None:
        super().__init__(settings, version, driver)
        self.entries: list[Entry] = []
        self._event = 0
        self.memory.watch = self._note

    def after_event(self) -> None:
        self._event += 1

    def _note(self, action: str, address: int, size: int, stream: int) -> None:
        self.entries.append(Entry(action, address, size, stream, self._event))

    def malloc(self, size: int, stream: int = 0) -> Block:
        try:
            block = super().malloc(size, stream)
        except OutOfMemory:
            self._note("oom", -1, block_size(size, self.settings.roundup_power2_divisions), stream)
            raise
        self._note("alloc", block.address, size, stream)
        return block

    def free(self, block: Block) -> None:
        self._note("free_requested", block.address, block.requested, block.shelf.stream)
        super().free(block)

    def free_until_completed(self, block: Block) -> None:
        self._note("free_requested", block.address, block.requested, block.shelf.stream)
        super().free_until_completed(block)

    def _free(self, block: Block) -> None:
        self._note("free_completed", block.address, block.requested, block.shelf.stream)
        super()._free(block)


def history(
    events: Iterable[Event],
    config: Settings | str = "",
    version: Version | str = DEFAULT_VERSION,
    capacity: int | None = None,
    *,
    memory_fraction: float | None = None,
    used: int = 0,
    progress: Progress = silent,
) -> History:
    """Replays a stream as `replay` does, and keeps the counters after every event.

    Args:
        events: as for `replay`, like all that follow.
        config: as PYTORCH_CUDA_ALLOC_CONF.
        version: the release of PyTorch whose rules hold.
        capacity: bytes of the device.
        memory_fraction: as in torch.cuda.set_per_process_memory_fraction.
        used: bytes of the device that are gone from the start.
        progress: told "allocator" and how many events are replayed.

    Raises:
        InputError: as `replay`.
    """
    version, config = rules(config, version, memory_fraction)
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
