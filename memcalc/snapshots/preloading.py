"""Puts PyTorch's allocator into the state in which a recording begins."""

from __future__ import annotations

from itertools import groupby

from memcalc.allocator.blocks import FREE, IN_USE, UNMAPPED, WAITING, Block, Segment, Shelf, insert_after
from memcalc.allocator.pools import Pool, PoolPair
from memcalc.allocator.pytorch.caching import CachingAllocator
from memcalc.allocator.pytorch.constants import SMALL_SEGMENT
from memcalc.allocator.sizes import multiple
from memcalc.snapshots.beginning import Beginning, Held, Range


def preload(allocator: CachingAllocator, state: Beginning) -> dict[int, Block]:
    """Gives the allocator the segments and blocks of a state; which segment came first is not known: by address.

    Returns:
        the blocks in use, by address.
    """
    blocks: dict[int, Block] = {}
    ranges = sorted(state.ranges.values(), key=lambda found: found.address)
    held = sorted(state.held.values(), key=lambda found: found.address)
    for found in ranges:
        if not found.is_expandable:
            segment = allocator.memory.new_segment(_shelf(allocator, found), found.address, found.size)
            allocator.memory.changed(segment.shelf, found.address, found.size, segments=1)
            _fill(allocator, segment, None, [found], held, blocks)
    expandable = [found for found in ranges if found.is_expandable]
    key = lambda found: (found.pool, found.stream, found.is_small)  # noqa: E731 - used twice on the next lines
    for _, group in groupby(sorted(expandable, key=key), key=key):
        _expandable(allocator, list(group), held, blocks)
    return blocks


def _pair(allocator: CachingAllocator, pool: int) -> PoolPair:
    if not pool:
        return allocator.default
    allocator.private.begin(pool, frozenset())
    allocator.private.end(pool)
    return allocator.private.pools[pool]


def _shelf(allocator: CachingAllocator, found: Range) -> Shelf:
    pair = _pair(allocator, found.pool)
    pool: Pool = pair.small if found.is_small else pair.large
    return pool.shelf(found.stream)


def _expandable(allocator: CachingAllocator, ranges: list[Range], held: list[Held], blocks: dict[int, Block]) -> None:
    """One expandable segment with all mapped ranges of a stream and pool in it."""
    settings, capacity = allocator.settings, allocator.memory.driver.capacity
    page = SMALL_SEGMENT if ranges[0].is_small else settings.large_segment_size
    size = multiple(capacity + capacity // 8, page)
    segment = allocator.memory.new_segment(_shelf(allocator, ranges[0]), ranges[0].address, size, page)
    for found in ranges:
        allocator.memory.changed(segment.shelf, found.address, found.size, segments=0)
    last = _fill(allocator, segment, None, ranges, held, blocks)
    end = last.address + last.size
    if end < segment.address + size:
        _append(allocator, segment, last, end, segment.address + size - end, UNMAPPED)


def _fill(
    allocator: CachingAllocator,
    segment: Segment,
    last: Block | None,
    ranges: list[Range],
    held: list[Held],
    blocks: dict[int, Block],
) -> Block:
    """Divides a segment: blocks in use, free ones between them, unmapped ones between ranges."""
    for found in ranges:
        at, end = found.address, found.address + found.size
        if last is not None and last.address + last.size < at:
            begin = last.address + last.size
            last = _append(allocator, segment, last, begin, at - begin, UNMAPPED)
        for item in held:
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
                allocator.counters.inactive_changed(segment.shelf.pool.tally, block.size, 1)
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
        segment.shelf.add(block)
    elif state == UNMAPPED:
        segment.shelf.add_unmapped(block)
    return block


def _count(allocator: CachingAllocator, block: Block, item: Held) -> None:
    """Counts a block in use, or one that waits for other streams."""
    tally = block.shelf.pool.tally
    block.requested = item.requested
    allocator.counters.handed_out(tally, block.size, item.requested)
    if item.is_waiting:
        block.state = IN_USE
        allocator.free_until_completed(block)
