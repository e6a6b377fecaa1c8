"""A stream of events through the allocator: what is reserved, how fragmented, and where the run would die."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter

from memcalc.allocator.blocks import Block
from memcalc.allocator.driver import Driver
from memcalc.allocator.pytorch.caching import CachingAllocator
from memcalc.allocator.pytorch.settings import Settings, parse_settings
from memcalc.allocator.pytorch.versions import DEFAULT_VERSION, Version, parse_version
from memcalc.allocator.result import Failure, Moment, ReplayResult
from memcalc.errors import OutOfMemory
from memcalc.events.event import Event, Kind
from memcalc.events.timeline import out_of_order


def replay(
    events: Iterable[Event],
    config: Settings | str = "",
    version: Version | str = DEFAULT_VERSION,
    capacity: int | None = None,
    *,
    memory_fraction: float | None = None,
    used: int = 0,
) -> ReplayResult:
    """Runs a stream of events through PyTorch's caching allocator.

    A freed storage that other streams use is free again at its FREE_COMPLETED event; where the stream of events tells
    none, at the next allocation. Requests of 0 bytes allocate nothing.

    Args:
        events: in order; each storage's life from its alloc on.
        config: as PYTORCH_CUDA_ALLOC_CONF.
        version: the release of PyTorch whose rules hold.
        capacity: bytes of the device; None for one that never runs out.
        memory_fraction: as in torch.cuda.set_per_process_memory_fraction, for a `config` that is text.
        used: bytes of the device that are gone from the start (context, other processes).

    Raises:
        InputError: for a config that the version refuses, or events that cannot follow each other.
    """
    version, config = rules(config, version, memory_fraction)
    return run_through(events, CachingAllocator(config, version, Driver(capacity, used)))


def rules(config: Settings | str, version: Version | str, memory_fraction: float | None) -> tuple[Version, Settings]:
    """The release and the settings that `replay` was asked for."""
    if isinstance(version, str):
        version = parse_version(version)
    if isinstance(config, str):
        config = parse_settings(config, version, memory_fraction)
    return version, config


def run_through(
    events: Iterable[Event], allocator: CachingAllocator, after_each: Callable[[], None] | None = None
) -> ReplayResult:
    """Runs a stream of events through an allocator, and calls `after_each` after each of them but a fatal one."""
    events = events if isinstance(events, Sequence) else tuple(events)
    peak, failed = _run(events, allocator, after_each)
    peaks = allocator.counters.peaks
    return ReplayResult(
        peak_allocated=peaks.allocated,
        peak_active=max(peaks.active_bytes, peaks.allocated),
        peak_reserved=allocator.counters.reserved.peak,
        peak=peak,
        end=moment(failed.event - 1 if failed else len(events) - 1, allocator),
        failure=failed,
        statistics=allocator.statistics(),
        segments=allocator.segments(),
        notes=allocator.settings.notes,
    )


def moment(event: int, allocator: CachingAllocator) -> Moment:
    """The counters as they are."""
    counters = allocator.counters
    return Moment(
        event,
        counters.allocated_bytes,
        counters.active_bytes,
        counters.requested_bytes,
        counters.reserved_bytes,
        counters.inactive_split_bytes,
    )


def _run(
    events: Sequence[Event], allocator: CachingAllocator, after_each: Callable[[], None] | None
) -> tuple[Moment, Failure | None]:
    """Feeds the events until the last one or the one that the device has no memory for.

    Returns:
        the moment of the peak, and the failure.
    """
    alloc, free = Kind.ALLOC, Kind.FREE
    malloc, give_back, peaks = allocator.malloc, allocator.free, allocator.counters.peaks
    delayed = _completed_later(events)
    blocks: dict[int, Block | None] = {}
    waiting: dict[int, Block] = {}
    highest, peak = 0, Moment(-1)
    for index, (kind, storage, size, stream, *_) in enumerate(events):
        if kind is alloc:
            if storage in blocks:
                raise out_of_order(index, events[index], "allocates", "already alive")
            try:
                blocks[storage] = malloc(size, stream) if size else None
            except OutOfMemory as error:
                return peak, Failure(index, str(error))
            if peaks.allocated > highest:
                highest = peaks.allocated
                peak = moment(index, allocator)
        elif kind is free:
            if storage not in blocks:
                raise out_of_order(index, events[index], "frees", "not alive")
            block = blocks.pop(storage)
            if block is not None and index in delayed:
                allocator.free_until_completed(block)
                waiting[storage] = block
            elif block is not None:
                give_back(block)
        else:
            failed = _other(index, events[index], allocator, blocks, waiting)
            if failed:
                return peak, failed
        if after_each is not None:
            after_each()
    return peak, None


def _other(
    index: int, event: Event, allocator: CachingAllocator, blocks: dict[int, Block | None], waiting: dict[int, Block]
) -> Failure | None:
    """One of the rarer events.

    A run that was recorded dying is given another chance: another policy may find the memory.
    """
    if event.kind is Kind.FREE_COMPLETED:
        block = waiting.pop(event.storage, None)
        if block is not None:
            allocator.complete(block)
    elif event.kind is Kind.RECORD_STREAM:
        if event.storage not in blocks:
            raise out_of_order(index, event, "uses", "not alive")
        block = blocks[event.storage]
        if block is not None:
            allocator.record_stream(block, event.stream)
    elif event.kind is Kind.EMPTY_CACHE:
        allocator.empty_cache()
    elif event.kind is Kind.OOM:
        try:
            allocator.free(allocator.malloc(event.bytes, event.stream))
        except OutOfMemory as error:
            return Failure(index, str(error))
    return None


def _completed_later(events: Sequence[Event]) -> frozenset[int]:
    """Which FREE events have a FREE_COMPLETED event of their own, as positions."""
    if Kind.FREE_COMPLETED not in map(itemgetter(0), events):
        return frozenset()
    freed: dict[int, int] = {}
    found = set()
    for index, event in enumerate(events):
        if event.kind is Kind.FREE:
            freed[event.storage] = index
        elif event.kind is Kind.FREE_COMPLETED and event.storage in freed:
            found.add(freed.pop(event.storage))
    return frozenset(found)
