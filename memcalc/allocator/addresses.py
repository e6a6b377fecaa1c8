"""Addresses that the CUDA driver chooses for new segments: chunks of 32 MiB, from the top of the address space down.

The driver takes address space in multiples of 32 MiB, aligned to 32 MiB. The remainder of a chunk serves other requests
that fit; an empty chunk is released. So a segment of 20 MiB leaves space for six segments of 2 MiB, and later segments
have lower addresses. PyTorch up to 2.11 breaks ties between free blocks of equal size by address.

Derived from memory snapshots of an H100 under driver 580 (benchmarks/recordings/gpu/h100-80gb-torch-2.11.0/snapshots):
in the four snapshots that only allocate, without expandable segments, all 99 segments have the addresses computed here.
What the driver itself places between them during training (loaded kernels, library handles) is not modelled.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from itertools import pairwise

from memcalc.allocator.sizes import MIB, multiple

CHUNK = 32 * MIB
HOST_PAGE = 4096  # bytes; a chunk is aligned inside a mapping that is one chunk larger, minus one page


class AddressSpace:
    """Allocation of addresses below an upper end, for sizes that are multiples of the driver's granule.

    Args:
        end: upper end of the address space, a multiple of the chunk size.
    """

    def __init__(self, end: int) -> None:
        self._end = end
        self._begins: list[int] = []  # of the chunks, sorted
        self._chunks: dict[int, tuple[int, FreeRanges]] = {}  # begin of each chunk -> its end and its free ranges
        self._room: dict[int, int] = {}  # begin of each chunk that is not full -> its largest free range
        self._roomy: list[int] = []  # the keys of `_room`, sorted
        self._too_large = 0  # no chunk has a free range of this size or larger
        self._gaps = 0  # number of released chunks; without any, there are no free ranges between chunks

    def allocate(self, size: int) -> int:
        """Allocate `size` bytes and return the address: in the lowest chunk with enough space, or in a new chunk."""
        room, found = self._room, None
        if size < self._too_large:
            found = next((begin for begin in self._roomy if room[begin] >= size), None)
            if found is None:
                self._too_large = size
        begin = self._new(multiple(size, CHUNK)) if found is None else found
        ranges = self._chunks[begin][1]
        address = ranges.allocate(size)
        assert address is not None
        self._note_room(begin, ranges.largest)
        return address

    def free(self, address: int, size: int) -> None:
        """Free a range, and release its chunk if it is empty."""
        begin = self._begins[bisect_right(self._begins, address) - 1]
        ranges = self._chunks[begin][1]
        ranges.free(address, size)
        if not ranges.is_whole:
            self._note_room(begin, ranges.largest)
            return
        self._note_room(begin, 0)
        self._begins.remove(begin)
        del self._chunks[begin]
        self._gaps += 1

    def check(self) -> None:
        """Assert the invariants: chunks do not overlap, nor do the free ranges inside them."""
        end = 0
        for begin in self._begins:
            assert begin >= end
            end, ranges = self._chunks[begin]
            ranges.check()
            assert self._room.get(begin, 0) == ranges.largest < max(self._too_large, 1)
        assert sorted(self._room) == self._roomy

    def _note_room(self, begin: int, largest: int) -> None:
        """Record the largest free range of a chunk."""
        if largest and begin not in self._room:
            insort(self._roomy, begin)
        if largest:
            self._room[begin] = largest
            self._too_large = max(self._too_large, largest + 1)
        elif self._room.pop(begin, 0):
            del self._roomy[bisect_left(self._roomy, begin)]

    def _new(self, size: int) -> int:
        """Return the address of a new chunk: in the highest free range that fits it regardless of alignment."""
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
        self._chunks[begin] = (begin + size, FreeRanges(begin, begin + size))
        return begin


class FreeRanges:
    """The free ranges of an address space, sorted by address, never adjacent."""

    def __init__(self, begin: int, end: int) -> None:
        self._whole = (begin, end)
        self._holes = [self._whole]

    def allocate(self, size: int) -> int | None:
        """Allocate `size` bytes from the lowest range that fits and return the address; None if none fits."""
        for at, (begin, end) in enumerate(self._holes):
            if end - begin >= size:
                self._holes[at : at + 1] = [(begin + size, end)] if begin + size < end else []
                return begin
        return None

    def free(self, address: int, size: int) -> None:
        """Free a range."""
        begin, end = address, address + size
        at = bisect_left(self._holes, (begin, 0))
        if at < len(self._holes) and self._holes[at][0] == end:
            end = self._holes.pop(at)[1]
        if at and self._holes[at - 1][1] == begin:
            at -= 1
            begin = self._holes.pop(at)[0]
        self._holes.insert(at, (begin, end))

    @property
    def largest(self) -> int:
        """Bytes of the largest free range."""
        return max((end - begin for begin, end in self._holes), default=0)

    @property
    def is_whole(self) -> bool:
        """Whether the whole address space is free."""
        return self._holes == [self._whole]

    def check(self) -> None:
        """Assert the invariant: ranges are sorted and not adjacent."""
        assert all(left[1] < right[0] for left, right in pairwise(self._holes))
