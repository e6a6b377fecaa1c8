"""Expandable segments: address space that memory is mapped into page by page.

Source: torch c10/cuda/CUDACachingAllocator.cpp: ExpandableSegment, find_expandable_block, map_block,
try_allocate_expandable_block, unmap_block, release_expandable_segment.
"""

from __future__ import annotations

from memcalc.allocator.blocks import FREE, UNMAPPED, Block, FreeBlockSet, insert_after, insert_before, merge
from memcalc.allocator.pytorch.constants import HEADROOM, SMALL_SEGMENT
from memcalc.allocator.pytorch.memory import LimitedMemory
from memcalc.allocator.sizes import multiple


def expanded_size(block: Block) -> int:
    """Return the bytes that a free block can grow to; best fit prefers blocks that cannot grow."""
    after = block.next
    return block.size + (after.size if after is not None and after.state == UNMAPPED else 0)


def grow(memory: LimitedMemory, free_set: FreeBlockSet, size: int) -> Block | None:
    """Return a block of at least `size` bytes, in no set, mapping new memory if needed; None if memory runs out.

    Pages that were mapped before memory ran out stay, as a free block.
    """
    block = _lowest_room(memory, free_set, size)
    if block.state == UNMAPPED and not _map(memory, block, min(block.size, size)):
        return None
    while block.size < size:
        after = block.next
        assert after is not None
        if not _map(memory, after, min(size - block.size, after.size)):
            return None
        block = after  # `_map` merged the previous block into it
    free_set.remove(block)
    return block


def _lowest_room(memory: LimitedMemory, free_set: FreeBlockSet, size: int) -> Block:
    """Return the first block of the lowest run of free and unmapped blocks with room for `size` bytes."""
    for _, unmapped in free_set.unmapped:
        before = unmapped.previous
        first = before if before is not None and before.state == FREE else unmapped
        capacity, block = 0, first
        while capacity < size and block.state in {FREE, UNMAPPED}:
            capacity += block.size
            if block.next is None:
                break
            block = block.next
        if capacity >= size:
            return first
    return _reserve(memory, free_set)


def _reserve(memory: LimitedMemory, free_set: FreeBlockSet) -> Block:
    """Reserve the addresses of a new segment, all unmapped."""
    page = SMALL_SEGMENT if free_set.pool.small else memory.settings.large_segment_size
    capacity = memory.driver.capacity
    size = multiple(capacity + capacity // HEADROOM, page)
    segment = memory.new_segment(free_set, memory.driver.reserve_addresses(size), size, page)
    segment.head = block = memory.new_block(segment, segment.address, size)
    free_set.add_unmapped(block)
    return block


def _map(memory: LimitedMemory, block: Block, size: int) -> bool:
    """Map whole pages at the front of an unmapped block, which becomes free and is merged with its free neighbors."""
    segment, free_set = block.segment, block.free_set
    mapped = multiple(size, segment.page)  # an unmapped block begins at a page boundary
    if not memory.driver.map_pages(mapped // segment.page, segment.page):
        return False
    free_set.remove_unmapped(block)
    block.state = FREE
    begin = block.address
    if mapped < block.size:
        rest = memory.new_block(segment, block.address + mapped, block.size - mapped)
        insert_after(rest, block)
        free_set.add_unmapped(rest)
        block.size = mapped
    merge(block, block.previous)
    merge(block, block.next)
    free_set.add(block)
    memory.changed(free_set, begin, mapped, segments=0)
    return True


def unmap(memory: LimitedMemory, block: Block) -> None:
    """Unmap the whole pages inside a free block; what remains of it before and after stays free.

    A segment without mapped memory releases its addresses.
    """
    segment, free_set = block.segment, block.free_set
    begin = segment.address + multiple(block.address - segment.address, segment.page)
    end = segment.address + (block.address + block.size - segment.address) // segment.page * segment.page
    if begin >= end:
        return
    free_set.remove(block)
    if begin > block.address:
        before = memory.new_block(segment, block.address, begin - block.address)
        insert_before(before, block)
        free_set.add(before)
    if end < block.address + block.size:
        after = memory.new_block(segment, end, block.address + block.size - end)
        insert_after(after, block)
        free_set.add(after)
    block.address, block.size, block.state = begin, end - begin, UNMAPPED
    merge(block, block.previous)
    merge(block, block.next)
    free_set.add_unmapped(block)
    memory.driver.unmap_pages((end - begin) // segment.page, segment.page)
    memory.changed(free_set, begin, begin - end, segments=0)
    if block.previous is None and block.next is None:
        free_set.remove_unmapped(block)
        free_set.pool.segments.remove(segment)
