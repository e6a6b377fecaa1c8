"""Where the CUDA driver puts what is allocated: address space by chunks of 32 MiB, from the top down.

The driver takes address space in multiples of 32 MiB, aligned to it, and hands out what is left of a chunk to whoever
fits; a chunk that nothing is in any more is given back. So a segment of 20 MiB leaves room for six of 2 MiB, and later
segments lie below earlier ones. PyTorch up to 2.11 breaks ties between blocks of equal size by address.

Read off memory snapshots of an H100 under driver 580 (benchmarks/recordings/gpu/h100-80gb-torch-2.11.0/snapshots): all
99 segments of the four that only allocate, without expandable segments, lie where this says. What the driver itself
puts among them (loaded kernels, libraries' handles), as in the one that trains, is not modelled.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

from memcalc.allocator.holes import Holes
from memcalc.allocator.sizes import MIB, multiple

CHUNK = 32 * MIB
HOST_PAGE = 4096  # of the host: a chunk is cut out of a mapping that is one chunk larger, less a page


class AddressSpace:
    """Addresses below an end, for sizes that are multiples of the driver's granule.

    Args:
        end: of the address space, a multiple of a chunk.
    """

    def __init__(self, end: int) -> None:
        self._end = end
        self._begins: list[int] = []  # of the chunks, sorted
        self._chunks: dict[int, tuple[int, Holes]] = {}  # their ends, and what is free in them
        self._room: dict[int, int] = {}  # the most that fits into each of those that are not full
        self._roomy: list[int] = []  # the begins of those, sorted
        self._too_large = 0  # no chunk has room for so much, nor for more
        self._gaps = 0  # chunks that were given back: without any there are no holes between the others

    def take(self, size: int) -> int:
        """The address of `size` new bytes: in the lowest chunk that has room, or in a new one."""
        room, found = self._room, None
        if size < self._too_large:
            found = next((begin for begin in self._roomy if room[begin] >= size), None)
            if found is None:
                self._too_large = size
        begin = self._new(multiple(size, CHUNK)) if found is None else found
        holes = self._chunks[begin][1]
        address = holes.take(size)
        assert address is not None
        self._note_room(begin, holes.largest)
        return address

    def put(self, address: int, size: int) -> None:
        """Takes a range back, and gives its chunk back when it was the last there."""
        begin = self._begins[bisect_right(self._begins, address) - 1]
        holes = self._chunks[begin][1]
        holes.put(address, size)
        if not holes.is_whole:
            self._note_room(begin, holes.largest)
            return
        self._note_room(begin, 0)
        self._begins.remove(begin)
        del self._chunks[begin]
        self._gaps += 1

    def check(self) -> None:
        """States the invariants: chunks are apart, and so are the free ranges in them."""
        end = 0
        for begin in self._begins:
            assert begin >= end
            end, holes = self._chunks[begin]
            holes.check()
            assert self._room.get(begin, 0) == holes.largest < max(self._too_large, 1)
        assert sorted(self._room) == self._roomy

    def _note_room(self, begin: int, largest: int) -> None:
        """Keeps how much fits into a chunk."""
        if largest and begin not in self._room:
            insort(self._roomy, begin)
        if largest:
            self._room[begin] = largest
            self._too_large = max(self._too_large, largest + 1)
        elif self._room.pop(begin, 0):
            del self._roomy[bisect_left(self._roomy, begin)]

    def _new(self, size: int) -> int:
        """Where a new chunk begins: the highest hole that has room for it wherever that begins."""
        wanted = size + CHUNK - HOST_PAGE
        end = self._end
        if self._gaps:
            for begin in reversed(self._begins):
                if end - self._chunks[begin][0] >= wanted:
                    break
                end = begin
        elif self._begins:
            end = self._begins[0]
        begin = multiple(end - wanted, CHUNK)
        insort(self._begins, begin)
        self._chunks[begin] = (begin + size, Holes(begin, begin + size))
        return begin
