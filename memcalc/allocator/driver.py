"""The CUDA driver's side: a device of a certain capacity, addresses, and what is free.

A model: physical memory is counted in granules of 2 MiB, which ranges smaller than one share. PyTorch's counters do not
depend on the addresses; which of two equal blocks is reused may, up to 2.11.
"""

from __future__ import annotations

from memcalc.allocator.addresses import AddressSpace
from memcalc.allocator.holes import Holes
from memcalc.allocator.sizes import MIB, multiple

GRANULE = 2 * MIB  # cuMemGetAllocationGranularity on all cards so far
SMALL_ALIGNMENT = 512  # of cudaMalloc's addresses; small ranges lie side by side in a granule
END_OF_ADDRESSES = 2**47  # of a program's on x86-64, below which CUDA's lie; any multiple of a chunk would do
FIRST_RESERVED = 2**56  # address space for expandable segments, apart from the rest
ADDRESS_BITS = 60  # no address needs more
UNKNOWN_CAPACITY = 2**50  # 1 PiB: a device whose size nobody named never runs out


class Driver:
    """A device's memory.

    Args:
        capacity: bytes of the device; None for one that never runs out.
        used: bytes that are gone from the start: CUDA context, other processes, communication libraries.
        addresses: where ranges lie; None: where CUDA's driver puts them.
    """

    def __init__(
        self, capacity: int | None = None, used: int = 0, addresses: AddressSpace | Holes | None = None
    ) -> None:
        self.capacity = UNKNOWN_CAPACITY if capacity is None else capacity
        self.free_bytes = self.least_free_bytes = self.capacity - used
        self._addresses = AddressSpace(END_OF_ADDRESSES) if addresses is None else addresses
        self._shared: dict[int, Holes] = {}  # granules that several small ranges lie in, by address
        self._reserved_end = FIRST_RESERVED

    def malloc(self, size: int) -> int | None:
        """The address of `size` new bytes; None when the device has not that much left.

        What is smaller than a granule shares one with others of its kind.
        """
        if size >= GRANULE:
            return self._take(multiple(size, GRANULE))
        size = multiple(size, SMALL_ALIGNMENT)
        for holes in self._shared.values():
            address = holes.take(size)
            if address is not None:
                return address
        granule = self._take(GRANULE)
        if granule is None:
            return None
        self._shared[granule] = holes = Holes(granule, granule + GRANULE)
        return holes.take(size)

    def free(self, address: int, size: int) -> None:
        """Takes a range back."""
        granule = address // GRANULE * GRANULE
        if size >= GRANULE:
            self._put(address, multiple(size, GRANULE))
            return
        holes = self._shared[granule]
        holes.put(address, multiple(size, SMALL_ALIGNMENT))
        if holes.is_whole:
            del self._shared[granule]
            self._put(granule, GRANULE)

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
        self._use(size)
        return True

    def unmap_pages(self, pages: int, page: int) -> None:
        """Takes the memory of pages back."""
        self.free_bytes += pages * multiple(page, GRANULE)

    def check(self) -> None:
        """States the invariant of the free ranges."""
        for ranges in (self._addresses, *self._shared.values()):
            ranges.check()

    def _take(self, size: int) -> int | None:
        if size > self.free_bytes:
            return None
        self._use(size)
        return self._addresses.take(size)

    def _put(self, address: int, size: int) -> None:
        self.free_bytes += size
        self._addresses.put(address, size)

    def _use(self, size: int) -> None:
        self.free_bytes -= size
        self.least_free_bytes = min(self.least_free_bytes, self.free_bytes)
