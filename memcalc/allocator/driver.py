"""A model of the CUDA driver: a device with a capacity, addresses, and free memory.

Physical memory is counted in granules of 2 MiB; smaller ranges share a granule. PyTorch's counters do not depend on
addresses, with one exception: up to 2.11 the address decides which of two equal free blocks is reused.
"""

from __future__ import annotations

from memcalc.allocator.addresses import AddressSpace, FreeRanges
from memcalc.allocator.sizes import MIB, multiple

GRANULE = 2 * MIB  # cuMemGetAllocationGranularity on all GPUs so far
SMALL_ALIGNMENT = 512  # of cudaMalloc's addresses; small ranges are adjacent within a granule
END_OF_ADDRESSES = 2**47  # of an x86-64 process; CUDA addresses are below it. Any multiple of a chunk would do.
FIRST_RESERVED = 2**56  # begin of the address space for expandable segments, separate from other addresses
ADDRESS_BITS = 60  # no address needs more
UNKNOWN_CAPACITY = 2**50  # 1 PiB: a device without a given size never runs out of memory


class Driver:
    """The memory of one device.

    Args:
        capacity: bytes of the device; None for a device that never runs out of memory.
        used: bytes in use from the start: CUDA context, other processes, communication libraries.
        addresses: chooses addresses; None for the model of the CUDA driver.
    """

    def __init__(
        self, capacity: int | None = None, used: int = 0, addresses: AddressSpace | FreeRanges | None = None
    ) -> None:
        self.capacity = UNKNOWN_CAPACITY if capacity is None else capacity
        self.free_bytes = self.least_free_bytes = self.capacity - used
        self._addresses = AddressSpace(END_OF_ADDRESSES) if addresses is None else addresses
        self._shared: dict[int, FreeRanges] = {}  # address of each granule with several small ranges -> its free ranges
        self._reserved_end = FIRST_RESERVED

    def malloc(self, size: int) -> int | None:
        """Allocate `size` bytes and return the address; None if the device has not enough free memory.

        Ranges smaller than a granule share one.
        """
        if size >= GRANULE:
            return self._take(multiple(size, GRANULE))
        size = multiple(size, SMALL_ALIGNMENT)
        for ranges in self._shared.values():
            address = ranges.allocate(size)
            if address is not None:
                return address
        granule = self._take(GRANULE)
        if granule is None:
            return None
        self._shared[granule] = ranges = FreeRanges(granule, granule + GRANULE)
        return ranges.allocate(size)

    def free(self, address: int, size: int) -> None:
        """Free a range."""
        granule = address // GRANULE * GRANULE
        if size >= GRANULE:
            self._put(address, multiple(size, GRANULE))
            return
        ranges = self._shared[granule]
        ranges.free(address, multiple(size, SMALL_ALIGNMENT))
        if ranges.is_whole:
            del self._shared[granule]
            self._put(granule, GRANULE)

    def reserve_addresses(self, size: int) -> int:
        """Return the address of a new range of `size` bytes without mapped memory; ranges are never reused."""
        begin = self._reserved_end
        self._reserved_end += multiple(size, GRANULE)
        return begin

    def map_pages(self, pages: int, page: int) -> bool:
        """Map memory to `pages` pages of `page` bytes, all or none; return whether memory sufficed."""
        size = pages * multiple(page, GRANULE)
        if size > self.free_bytes:
            return False
        self._use(size)
        return True

    def unmap_pages(self, pages: int, page: int) -> None:
        """Unmap the memory of pages."""
        self.free_bytes += pages * multiple(page, GRANULE)

    def check(self) -> None:
        """Assert the invariants of the free ranges."""
        for ranges in (self._addresses, *self._shared.values()):
            ranges.check()

    def _take(self, size: int) -> int | None:
        if size > self.free_bytes:
            return None
        self._use(size)
        return self._addresses.allocate(size)

    def _put(self, address: int, size: int) -> None:
        self.free_bytes += size
        self._addresses.free(address, size)

    def _use(self, size: int) -> None:
        self.free_bytes -= size
        self.least_free_bytes = min(self.least_free_bytes, self.free_bytes)
