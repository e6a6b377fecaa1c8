"""Allocator replay of an event stream: reserved memory, fragmentation, and the event that runs out of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter

from memcalc.allocator.base import BlockAllocator
from memcalc.allocator.blocks import Block
from memcalc.allocator.paddle.collection import transformed
from memcalc.allocator.pytorch.caching import CachingAllocator
from memcalc.allocator.pytorch.settings import Settings, parse_settings
from memcalc.allocator.pytorch.versions import DEFAULT_VERSION, Version, parse_version
from memcalc.allocator.registry import AllocatorDevice, NewAllocator, make
from memcalc.allocator.result import CounterSample, FailedAllocation, ReplayResult
from memcalc.allocator.views import SegmentView
from memcalc.errors import OutOfMemory
from memcalc.events.event import Event, EventType
from memcalc.events.timeline import out_of_order


def replay(
    events: Iterable[Event],
    config: Settings | str = "",
    version: Version | str | None = None,
    capacity: int | None = None,
    *,
    policy: str = "pytorch",
    memory_fraction: float | None = None,
    used: int = 0,
    capability_major: int | None = None,
) -> ReplayResult:
    """Replay an event stream through an allocator.

    A freed storage that other streams use is reusable at its FREE_COMPLETED event; without such an event, at the next
    allocation. Requests of 0 bytes allocate nothing.

    Args:
        events: in order; each storage starts with its alloc.
        config: the settings in the framework's syntax (PyTorch: PYTORCH_CUDA_ALLOC_CONF), or PyTorch settings as
            parsed.
        version: the framework's version; None for the newest one known.
        capacity: bytes of the device; None for a device that never runs out of memory.
        policy: the allocator, a name in `memcalc.allocator.registry.POLICIES`.
        memory_fraction: as in torch.cuda.set_per_process_memory_fraction, if `config` is text.
        used: bytes of the device in use from the start (context, other processes).
        capability_major: major compute capability of the device; TensorFlow's reserve depends on it.

    Raises:
        InputError: for settings that the framework rejects, or events that cannot follow each other.
    """
    device = AllocatorDevice(capacity=capacity, used=used, capability_major=capability_major)
    events = events if isinstance(events, Sequence) else tuple(events)
    if isinstance(config, Settings):
        release, config = rules(config, version or DEFAULT_VERSION, memory_fraction)
        made = NewAllocator(CachingAllocator(config, release, device.driver()), config.notes)
    else:
        made = make(policy, config, None if version is None else str(version), device, memory_fraction)
    if made.paddle is not None:
        events = transformed(events, made.paddle)
    return run(events, made.allocator, made.notes)


def rules(config: Settings | str, version: Version | str, memory_fraction: float | None) -> tuple[Version, Settings]:
    """Return the requested PyTorch version and settings, parsed."""
    if isinstance(version, str):
        version = parse_version(version)
    if isinstance(config, str):
        config = parse_settings(config, version, memory_fraction)
    return version, config


def run(
    events: Sequence[Event],
    allocator: BlockAllocator,
    notes: tuple[str, ...] = (),
    *,
    until: int | None = None,
    after_each: Callable[[], None] | None = None,
) -> ReplayResult:
    """Replay an event stream through a new allocator; see `replay`.

    Args:
        events: in order.
        allocator: serves the events; it has not allocated anything yet.
        notes: settings that have no effect, copied to the result.
        until: the position of the last event to replay; None for all.
        after_each: called after each event except one that runs out of memory.
    """
    count = len(events) if until is None else min(until + 1, len(events))
    driver = allocator.device.driver
    unused = driver.free_bytes
    feeding = _ReplayState(allocator, events, after_each)
    feeding.feed(count)
    counters, failure = allocator.counters, feeding.failure
    return ReplayResult(
        peak_allocated=counters.peaks.allocated,
        peak_reserved=counters.reserved.peak,
        peak_device=unused - driver.least_free_bytes,
        peak_allocated_sample=feeding.peak,
        peak_reserved_sample=feeding.peak_reserved_sample,
        end=sample(failure.event - 1 if failure else count - 1, allocator),
        failure=failure,
        device_allocations=counters.num_device_alloc,
        device_frees=counters.num_device_free,
        statistics=allocator.statistics(),
        segments=allocator.segments(),
        notes=notes,
    )


def state_after(
    events: Sequence[Event], allocator: BlockAllocator, last: int
) -> tuple[tuple[SegmentView, ...], dict[int, Event]]:
    """Return the segments after event `last`, and the allocation event of each block, by address.

    Args:
        events: in order.
        allocator: serves the events; it has not allocated anything yet.
        last: the position of the last event to replay.
    """
    feeding = _ReplayState(allocator, events, None)
    feeding.feed(last + 1)
    return allocator.segments(), feeding.owners()


def sample(event: int, allocator: BlockAllocator) -> CounterSample:
    """Return the current counters."""
    counters = allocator.counters
    return CounterSample(
        event,
        counters.allocated_bytes,
        counters.active_bytes,
        counters.requested_bytes,
        counters.reserved_bytes,
        counters.inactive_split_bytes,
    )


class _ReplayState:
    """The state of a replay: it ends after the last event, or at the event that runs out of memory."""

    def __init__(
        self, allocator: BlockAllocator, events: Sequence[Event], after_each: Callable[[], None] | None
    ) -> None:
        self.failure: FailedAllocation | None = None
        self.peak = CounterSample(-1)
        self.peak_reserved_sample = CounterSample(-1)
        self._allocator = allocator
        self._events = events
        self._after_each = after_each
        self._delayed = _completed_later(events)
        self._blocks: dict[int, Block | None] = {}
        self._waiting: dict[int, Block] = {}
        self._fed = 0  # number of events replayed

    def feed(self, end: int) -> None:
        """Replay the events up to `end` (exclusive). Inlined, because the loop runs once per event."""
        alloc, free = EventType.ALLOC, EventType.FREE
        events, allocator, blocks, delayed = self._events, self._allocator, self._blocks, self._delayed
        malloc, give_back, peaks = allocator.malloc, allocator.free, allocator.counters.peaks
        reserved, after_each = allocator.counters.reserved, self._after_each
        highest, widest = self.peak.allocated, self.peak_reserved_sample.reserved
        self._fed = end
        for index, (kind, storage, size, stream, *_) in enumerate(events if end == len(events) else events[:end]):
            if kind is alloc:
                if storage in blocks:
                    raise out_of_order(index, events[index], "allocates", "already allocated")
                try:
                    blocks[storage] = malloc(size, stream) if size else None
                except OutOfMemory as error:
                    self.failure = FailedAllocation(index, str(error))
                    return
                if peaks.allocated > highest or reserved.peak > widest:
                    highest, widest = self._note_peaks(index, highest, widest)
            elif kind is free:
                if storage not in blocks:
                    raise out_of_order(index, events[index], "frees", "not allocated")
                block = blocks.pop(storage)
                if block is not None and index in delayed:
                    allocator.free_until_completed(block)
                    self._waiting[storage] = block
                elif block is not None:
                    give_back(block)
            else:
                self.failure = _other(index, events[index], allocator, blocks, self._waiting)
                if self.failure:
                    return
            if after_each is not None:
                after_each()

    def owners(self) -> dict[int, Event]:
        """Return the allocation event of each block in use, by address."""
        wanted = {storage: block.address for storage, block in self._blocks.items() if block is not None}
        found: dict[int, Event] = {}
        for event in self._events[: self._fed]:  # the last lifetime of a storage counts
            if event.kind is EventType.ALLOC and event.storage in wanted:
                found[wanted[event.storage]] = event
        return found

    def _note_peaks(self, index: int, highest: int, widest: int) -> tuple[int, int]:
        """Store the counters at a new peak of allocated or reserved memory; return the new peaks."""
        counters = self._allocator.counters
        now = sample(index, self._allocator)
        if counters.peaks.allocated > highest:
            self.peak = now
        if counters.reserved.peak > widest:
            self.peak_reserved_sample = now
        return counters.peaks.allocated, counters.reserved.peak


def _other(
    index: int, event: Event, allocator: BlockAllocator, blocks: dict[int, Block | None], waiting: dict[int, Block]
) -> FailedAllocation | None:
    """Replay one of the rarer events.

    A recorded OOM event is retried, because another allocator may have enough memory.
    """
    if event.kind is EventType.FREE_COMPLETED:
        block = waiting.pop(event.storage, None)
        if block is not None:
            allocator.complete(block)
    elif event.kind is EventType.RECORD_STREAM:
        if event.storage not in blocks:
            raise out_of_order(index, event, "uses", "not allocated")
        block = blocks[event.storage]
        if block is not None:
            allocator.record_stream(block, event.stream)
    elif event.kind is EventType.EMPTY_CACHE:
        allocator.empty_cache()
    elif event.kind is EventType.OOM:
        try:
            allocator.free(allocator.malloc(event.bytes, event.stream))
        except OutOfMemory as error:
            return FailedAllocation(index, str(error))
    return None


def _completed_later(events: Sequence[Event]) -> frozenset[int]:
    """Return the positions of FREE events that have a matching FREE_COMPLETED event."""
    if EventType.FREE_COMPLETED not in map(itemgetter(0), events):
        return frozenset()
    freed: dict[int, int] = {}
    found = set()
    for index, event in enumerate(events):
        if event.kind is EventType.FREE:
            freed[event.storage] = index
        elif event.kind is EventType.FREE_COMPLETED and event.storage in freed:
            found.add(freed.pop(event.storage))
    return frozenset(found)
