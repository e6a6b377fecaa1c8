"""The PyTorch caching allocator for the common case: default settings, and only three sums for counters.

It returns the same blocks as `CachingAllocator`, request by request, in a quarter of the time. This relies on one
property of the case: free neighbors are always merged, so the free blocks of a segment are the gaps between its blocks
in use. Blocks then need no linked objects: a free block is its *place* and its size.

Sizes and places are counted in blocks of 512 bytes. Places have the order by which PyTorch decides between free blocks
of equal size: of addresses (up to 2.11), or of segments and then of addresses (from 2.13 on). Two segments are always
separated by a gap. 2.12 decides by the order in which blocks were created, which places do not have: `serves` returns
False.

Each CUDA stream has separate free blocks. Nearly all requests are made on the default stream, so its pools are
attributes; segments of another stream have a separate range of places, which identifies the stream of a block.
"""

# ruff: noqa: C901, PLR0912, PLR0915, PLR1730 - `play` is one loop that runs for every request: calls would double it

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from memcalc.allocator.addresses import AddressSpace
from memcalc.allocator.driver import END_OF_ADDRESSES, GRANULE
from memcalc.allocator.pytorch.constants import MIN_BLOCK, SMALL_REQUEST, STREAM_SHIFT, UNSPLIT_REST
from memcalc.allocator.pytorch.rounding import segment_size
from memcalc.allocator.pytorch.settings import Settings
from memcalc.allocator.pytorch.versions import Version
from memcalc.errors import OutOfMemory

_BITS, _UP = MIN_BLOCK.bit_length() - 1, MIN_BLOCK - 1  # n + 511 >> 9 is n in blocks, rounded up
_SMALL, _UNSPLIT = SMALL_REQUEST // MIN_BLOCK, UNSPLIT_REST // MIN_BLOCK
_STREAM_BITS = STREAM_SHIFT - _BITS  # of a request in blocks: the bits above hold its stream
_OTHER_STREAM = 1 << _STREAM_BITS
_PLACE_BITS = 96  # the bits above hold the stream of a place
_OTHER_PLACE = 1 << _PLACE_BITS
_STRIDE = GRANULE // MIN_BLOCK + 1  # places per granule; + 1 separates adjacent segments


class PeakBytes(NamedTuple):
    """Peak bytes: of allocated blocks, and of requests rounded to whole blocks."""

    allocated: int
    requested: int


class _LeanPool:
    """Free blocks: sorted sizes, sorted places of each size, and the data for `would_repeat`.

    `inexact` has the requests since `watch` that got a larger block, each with the size of that block. `new_segments`
    has each segment since then: the number of such requests before it, and its size.
    """

    __slots__ = ("inexact", "new_segments", "places", "sizes")

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.places: dict[int, list[int]] = {}
        self.inexact: list[tuple[int, int]] = []
        self.new_segments: list[tuple[int, int]] = []

    def would_repeat(self) -> bool:
        """Return whether every request would get the same block if all later segments were already allocated and free.

        A request gets the smallest free block that is large enough; of equal ones, that of the oldest segment. So it
        gets the same block unless a later segment is also large enough, and smaller than that block. A block with
        exactly the requested size is always allocated.
        """
        later: list[int] = []
        end = len(self.inexact)
        for before, size in [*reversed(self.new_segments), (0, 0)]:
            if later:
                for request, block in {*self.inexact[before:end]}:
                    at = bisect_left(later, request)
                    if at < len(later) and later[at] < block:
                        return False
            insort(later, size)
            end = before
        return True


class LeanAllocator:
    """The allocator of a device, with default settings.

    Args:
        version: the PyTorch version, one that `serves` accepts.
        capacity: bytes of the device that the allocator can use; None for no limit.
    """

    def __init__(self, version: Version, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.peak_reserved_bytes = self.reserved_bytes = 0
        self.retries = 0  # how often the cache was emptied for a request, as num_alloc_retries
        self._addresses = AddressSpace(END_OF_ADDRESSES) if version.tie_break == "address" else None
        self._small, self._large = _LeanPool(), _LeanPool()
        self._others: dict[int, tuple[_LeanPool, _LeanPool]] = {}  # small and large blocks of other streams
        self._starts: dict[int, int] = {}  # place of each free block -> its size
        self._ends: dict[int, int] = {}  # end of each free block -> its place
        self._segments: dict[int, int] = {}  # place of each segment -> its size
        self._next = 0  # the place of the next segment, if addresses do not matter
        self._allocated = self._unasked = 0  # unasked: bytes of allocated blocks beyond their requests
        # Place and size of every block so far, and the excess of blocks that are larger than their request.
        self._places: list[int] = []
        self.block_sizes: list[int] = []
        # Requests that changed reserved memory: number, and reserved bytes after it.
        self.growth: list[tuple[int, int]] = []
        self._rests: dict[int, int] = {}
        self._watched = (0, 0, 0)  # allocated, unasked and retries at `watch`

    @staticmethod
    def serves(settings: Settings, version: Version) -> bool:
        """Return whether this allocator models a run with these settings."""
        return settings == Settings(notes=settings.notes) and version.tie_break != "block"

    def play(self, script: Iterable[int]) -> PeakBytes:
        """Serve requests and return the peak bytes, including those before the first and after the last request.

        It can be called again, with the requests that follow, unless it raises.

        Args:
            script: encoded requests. n > 0 requests n bytes, with the number of a stream above `STREAM_SHIFT`; ~n frees
                the block of the n-th request, counted from 0 over all calls; 0 is a request of 0 bytes, which is never
                freed.

        Raises:
            OutOfMemory: a request does not fit, even after the cache is emptied.
        """
        starts, ends = self._starts, self._ends
        small_sizes, small_places, small_inexact = self._small.sizes, self._small.places, self._small.inexact
        large_sizes, large_places, large_inexact = self._large.sizes, self._large.places, self._large.inexact
        places, taken, rests = self._places, self.block_sizes, self._rests
        allocated, unasked = self._allocated, self._unasked
        # `most` is the peak since `unasked` changed last; with it, it is a peak of asked bytes, too.
        most = most_allocated = allocated
        most_asked = allocated - unasked
        for change in script:
            if change > 0:
                request = (change + _UP) >> _BITS
                stream = 0
                if request > _SMALL:
                    if request >= _OTHER_STREAM:
                        stream = request >> _STREAM_BITS
                        request &= _OTHER_STREAM - 1
                        unsplit = _UNSPLIT if request > _SMALL else 0
                        pool = self._pools(stream)[request > _SMALL]
                        sizes, free, inexact = pool.sizes, pool.places, pool.inexact
                    else:
                        sizes, free, inexact, unsplit = large_sizes, large_places, large_inexact, _UNSPLIT
                else:
                    sizes, free, inexact, unsplit = small_sizes, small_places, small_inexact, 0
                at = bisect_left(sizes, request)
                try:
                    size = sizes[at]
                except IndexError:  # no free block is large enough
                    place, size = self._fetch(request, stream)
                else:
                    alike = free[size]
                    place = alike.pop(0)
                    if not alike:
                        del free[size], sizes[at]
                    del starts[place], ends[place + size]
                if size > request:
                    inexact.append((request, size))
                    rest = size - request
                    if rest > unsplit:
                        begin = place + request
                        starts[begin] = rest
                        ends[place + size] = begin
                        if rest in free:
                            insort(free[rest], begin)
                        else:
                            free[rest] = [begin]
                            insort(sizes, rest)
                        size = request
                    else:
                        rests[len(places)] = rest
                        most_allocated, most_asked = max(most_allocated, most), max(most_asked, most - unasked)
                        unasked += rest
                        most = allocated
                allocated += size
                if allocated > most:
                    most = allocated
                places.append(place)
                taken.append(size)
            elif change:
                number = ~change
                place, size = places[number], taken[number]
                if place < _OTHER_PLACE:
                    sizes, free = (large_sizes, large_places) if size > _SMALL else (small_sizes, small_places)
                else:
                    pool = self._pools(place >> _PLACE_BITS)[size > _SMALL]
                    sizes, free = pool.sizes, pool.places
                allocated -= size
                if number in rests:
                    most_allocated, most_asked = max(most_allocated, most), max(most_asked, most - unasked)
                    unasked -= rests[number]
                    most = allocated
                end = place + size
                if end in starts:
                    following = starts.pop(end)
                    alike = free[following]
                    if len(alike) > 1:
                        del alike[bisect_left(alike, end)]
                    else:
                        del free[following], sizes[bisect_left(sizes, following)]
                    size += following
                    end += following
                if place in ends:
                    begin = ends.pop(place)
                    before = place - begin
                    alike = free[before]
                    if len(alike) > 1:
                        del alike[bisect_left(alike, begin)]
                    else:
                        del free[before], sizes[bisect_left(sizes, before)]
                    size += before
                    place = begin
                starts[place] = size
                ends[end] = place
                if size in free:
                    insort(free[size], place)
                else:
                    free[size] = [place]
                    insort(sizes, size)
            else:
                places.append(0)
                taken.append(0)
        self._allocated, self._unasked = allocated, unasked
        return PeakBytes(max(most_allocated, most) * MIN_BLOCK, max(most_asked, most - unasked) * MIN_BLOCK)

    def watch(self) -> None:
        """Begin to record the data that `would_repeat` needs about the requests that follow."""
        self._watched = self._allocated, self._unasked, self.retries
        for pool in self._all_pools():
            pool.inexact.clear()
            pool.new_segments.clear()

    def would_repeat(self, carried: Callable[[], Sequence[tuple[int, int]] | None], /) -> bool:
        """Return whether the requests since `watch`, if repeated, would certainly get the same blocks.

        Free blocks are the gaps between blocks in use. So if the same blocks are in use as at `watch`, the only
        additional free memory is in segments allocated since then, until the request that each was allocated for.

        Args:
            carried: function that returns the earlier blocks that these requests freed, each with the block that the
                repetition frees instead, as numbers of requests; None if other requests follow.
        """
        if self._addresses is not None or self._watched != (self._allocated, self._unasked, self.retries):
            return False
        if not all(pool.would_repeat() for pool in self._all_pools()):
            return False
        pairs = carried()
        # With the same bytes in use, only blocks of the pairs and earlier blocks can be in use.
        return pairs is not None and all(self._block(one) == self._block(other) for one, other in pairs)

    def _block(self, number: int) -> tuple[int, int, int]:
        return self._places[number], self.block_sizes[number], self._rests.get(number, 0)

    def _all_pools(self) -> Iterable[_LeanPool]:
        return (self._large, self._small, *chain.from_iterable(self._others.values()))

    def _pools(self, stream: int) -> tuple[_LeanPool, _LeanPool]:
        if not stream:
            return self._small, self._large
        if stream not in self._others:
            self._others[stream] = (_LeanPool(), _LeanPool())
        return self._others[stream]

    def _fetch(self, request: int, stream: int) -> tuple[int, int]:
        """Return the place and the size of a new segment. Sizes of segments are multiples of a granule."""
        size = segment_size(request * MIN_BLOCK)
        if self.capacity is not None and self.reserved_bytes + size > self.capacity:
            self.empty_cache()
            self.retries += 1
            if self.reserved_bytes + size > self.capacity:
                raise OutOfMemory(
                    f"{size} bytes do not fit next to {self.reserved_bytes} bytes in use or in split segments."
                )
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        self.growth.append((len(self._places), self.reserved_bytes))
        if self._addresses is None:
            place = self._next
            self._next += size // MIN_BLOCK + 1
        else:
            place = self._addresses.allocate(size) // GRANULE * _STRIDE
        place += stream << _PLACE_BITS
        self._segments[place] = size // MIN_BLOCK
        pool = self._pools(stream)[request > _SMALL]
        pool.new_segments.append((len(pool.inexact), size // MIN_BLOCK))
        return place, size // MIN_BLOCK

    def empty_cache(self) -> None:
        """Free the segments that have no block in use to the driver."""
        for pool in self._all_pools():
            for size in [*pool.sizes]:
                whole = [place for place in pool.places[size] if self._segments.get(place) == size]
                for place in whole:
                    del self._starts[place], self._ends[place + size], self._segments[place]
                    self.reserved_bytes -= size * MIN_BLOCK
                    if self._addresses is not None:
                        self._addresses.free(place % _OTHER_PLACE // _STRIDE * GRANULE, size * MIN_BLOCK)
                left = [place for place in pool.places[size] if place in self._starts]
                if left:
                    pool.places[size][:] = left
                else:
                    pool.sizes.remove(size)
                    del pool.places[size]
