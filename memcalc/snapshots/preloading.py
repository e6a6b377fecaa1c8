"""Initialization of the PyTorch allocator model with the initial state of a recording."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from memcalc.allocator.blocks import FREE, IN_USE, UNMAPPED, WAITING, Block, FreeBlockSet, Segment, insert_after
from memcalc.allocator.pools import Pool, PoolPair
from memcalc.allocator.pytorch.caching import CachingAllocator
from memcalc.allocator.pytorch.constants import LARGE_SEGMENT, SMALL_SEGMENT
from memcalc.allocator.sizes import multiple
from memcalc.snapshots.initial_state import BlockInUse, InitialState, Range
from memcalc.snapshots.recording import SnapshotEntry


def preload(allocator: CachingAllocator, state: InitialState, entries: Sequence[SnapshotEntry]) -> dict[int, Block]:
    """Add the segments and blocks of a state to an allocator; their unknown creation order is taken by address.

    Args:
        allocator: a new allocator.
        state: the initial state.
        entries: the history: pages mapped later may belong to expandable segments that begin below them.

    Returns:
        the blocks in use, by address.
    """
    blocks: dict[int, Block] = {}
    ranges = sorted(state.ranges.values(), key=lambda found: found.address)
    blocks_in_use = sorted(state.blocks_in_use.values(), key=lambda found: found.address)
    for found in ranges:
        if not found.is_expandable:
            segment = allocator.memory.new_segment(_free_set_of(allocator, found), found.address, found.size)
            allocator.memory.changed(segment.free_set, found.address, found.size, segments=1)
            _fill(allocator, segment, None, [found], blocks_in_use, blocks)
    expandable = [found for found in ranges if found.is_expandable]
    key = lambda found: (found.pool, found.stream, found.is_small)  # noqa: E731 - used twice on the next lines
    for _, group in groupby(sorted(expandable, key=key), key=key):
        mapped = list(group)
        _expandable(allocator, mapped, _begin(mapped, ranges, entries), blocks_in_use, blocks)
    return blocks


def _begin(group: list[Range], ranges: list[Range], entries: Sequence[SnapshotEntry]) -> int:
    """Return the begin of an expandable segment: its lowest page that is mapped now or later.

    A page below belongs to the segment if the same stream maps whole pages there later, and no other segment is in
    between.
    """
    first = group[0]
    page = SMALL_SEGMENT if first.is_small else LARGE_SEGMENT
    below = max((r.address + r.size for r in ranges if r.address < first.address), default=0)
    mapped = (
        entry.address
        for entry in entries
        if entry.action == "segment_map"
        and entry.stream == first.stream
        and below <= entry.address < first.address
        and (first.address - entry.address) % page == 0
        and (entry.size % LARGE_SEGMENT != 0) == first.is_small
    )
    return min(mapped, default=first.address)


def _pair(allocator: CachingAllocator, pool: int) -> PoolPair:
    if not pool:
        return allocator.default
    allocator.private.begin(pool, frozenset())
    allocator.private.end(pool)
    return allocator.private.pools[pool]


def _free_set_of(allocator: CachingAllocator, found: Range) -> FreeBlockSet:
    pair = _pair(allocator, found.pool)
    pool: Pool = pair.small if found.is_small else pair.large
    return pool.free_set_of(found.stream)


def _expandable(
    allocator: CachingAllocator,
    ranges: list[Range],
    begin: int,
    blocks_in_use: list[BlockInUse],
    blocks: dict[int, Block],
) -> None:
    """Create one expandable segment with all mapped ranges of a stream and pool."""
    settings, capacity = allocator.settings, allocator.memory.driver.capacity
    page = SMALL_SEGMENT if ranges[0].is_small else settings.large_segment_size
    size = multiple(capacity + capacity // 8, page)
    segment = allocator.memory.new_segment(_free_set_of(allocator, ranges[0]), begin, size, page)
    for found in ranges:
        allocator.memory.changed(segment.free_set, found.address, found.size, segments=0)
    missing = ranges[0].address - begin
    unmapped = _append(allocator, segment, None, begin, missing, UNMAPPED) if missing else None
    last = _fill(allocator, segment, unmapped, ranges, blocks_in_use, blocks)
    end = last.address + last.size
    if end < segment.address + size:
        _append(allocator, segment, last, end, segment.address + size - end, UNMAPPED)


def _fill(
    allocator: CachingAllocator,
    segment: Segment,
    last: Block | None,
    ranges: list[Range],
    blocks_in_use: list[BlockInUse],
    blocks: dict[int, Block],
) -> Block:
    """Divide a segment: blocks in use, free blocks between them, unmapped blocks between ranges."""
    for found in ranges:
        at, end = found.address, found.address + found.size
        if last is not None and last.address + last.size < at:
            begin = last.address + last.size
            last = _append(allocator, segment, last, begin, at - begin, UNMAPPED)
        for item in blocks_in_use:
            if not at <= item.address < end:
                continue
            if item.address > at:
                last = _append(allocator, segment, last, at, item.address - at, FREE)
            assert item.size is not None
            last = _append(allocator, segment, last, item.address, item.size, WAITING if item.is_waiting else IN_USE)
            blocks[item.address] = last
            _count(allocator, last, item)
            at = item.address + item.size
        if at < end:
            last = _append(allocator, segment, last, at, end - at, FREE)
    assert last is not None
    if not segment.page and segment.head.next is not None:
        block: Block | None = segment.head
        while block is not None:
            if block.state == FREE:
                allocator.counters.inactive_changed(segment.free_set.pool.tally, block.size, 1)
            block = block.next
    return last


def _append(
    allocator: CachingAllocator, segment: Segment, last: Block | None, address: int, size: int, state: int
) -> Block:
    block = allocator.memory.new_block(segment, address, size, state)
    if last is None:
        segment.head = block
    else:
        insert_after(block, last)
    if state == FREE:
        segment.free_set.add(block)
    elif state == UNMAPPED:
        segment.free_set.add_unmapped(block)
    return block


def _count(allocator: CachingAllocator, block: Block, item: BlockInUse) -> None:
    """Count a block in use, or one that waits for other streams."""
    tally = block.free_set.pool.tally
    block.requested = item.requested
    allocator.counters.count_allocated(tally, block.size, item.requested)
    if item.is_waiting:
        block.state = IN_USE
        allocator.free_until_completed(block)
