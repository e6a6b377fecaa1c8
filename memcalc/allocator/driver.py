"""The CUDA driver's side: a device of a certain capacity, addresses, and what is free.

A model: physical memory is counted in granules of 2 MiB, and addresses are given first-fit in an empty address space,
freed ranges again. PyTorch's counters do not depend on the addresses; which of two equal blocks is reused may.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise

from memcalc.allocator.sizes import MIB, multiple

GRANULE = 2 * MIB  # cuMemGetAllocationGranularity on all cards so far
FIRST_ADDRESS = 2**46  # about where CUDA's begin; any multiple of a granule but 0 would do
FIRST_RESERVED = 2**56  # address space for expandable segments, apart from the rest
ADDRESS_BITS = 60  # no address needs more
UNKNOWN_CAPACITY = 2**50  # 1 PiB: a device whose size nobody named never runs out


class Driver:
    """A device's memory.

    Args:
        capacity: bytes of the device; None for one that never runs out.
        used: bytes that are gone from the start: CUDA context, other processes, communication libraries.
    """

    def __init__(self, capacity: int | None = None, used: int = 0) -> None:
        self.capacity = UNKNOWN_CAPACITY if capacity is None else capacity
        self.free_bytes = self.capacity - used
        self._holes: list[tuple[int, int]] = [
            (FIRST_ADDRESS, FIRST_RESERVED)
        ]  # (begin, end), by address, never adjacent
        self._reserved_end = FIRST_RESERVED

    def malloc(self, size: int) -> int | None:
        """The address of `size` new bytes; None when the device has not that much left."""
        size = multiple(size, GRANULE)
        if size > self.free_bytes:
            return None
        at = next(i for i, (begin, end) in enumerate(self._holes) if end - begin >= size)
        begin, end = self._holes[at]
        self._holes[at : at + 1] = [(begin + size, end)] if begin + size < end else []
        self.free_bytes -= size
        return begin

    def free(self, address: int, size: int) -> None:
        """Takes a range back."""
        size = multiple(size, GRANULE)
        self.free_bytes += size
        at = bisect_left(self._holes, (address, 0))
        begin, end = address, address + size
        if at < len(self._holes) and self._holes[at][0] == end:
            end = self._holes.pop(at)[1]
        if at and self._holes[at - 1][1] == begin:
            at -= 1
            begin = self._holes.pop(at)[0]
        self._holes.insert(at, (begin, end))

    def reserve_addresses(self, size: int) -> int:
        """The address of a new range of `size` bytes without memory behind it; ranges are never used again."""
        begin = self._reserved_end
        self._reserved_end += multiple(size, GRANULE)
        return begin

    def map_pages(self, pages: int, page: int) -> bool:
        """Puts memory behind `pages` pages of `page` bytes, all or none."""
        size = pages * multiple(page, GRANULE)
        if size > self.free_bytes:
            return False
        self.free_bytes -= size
        return True

    def unmap_pages(self, pages: int, page: int) -> None:
        """Takes the memory of pages back."""
        self.free_bytes += pages * multiple(page, GRANULE)

    def check(self) -> None:
        """States the invariant of the holes: sorted, apart."""
        assert all(left[1] < right[0] for left, right in pairwise(self._holes))
