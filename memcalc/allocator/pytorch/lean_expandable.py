"""The PyTorch caching allocator with `expandable_segments:True`, default settings otherwise.

It returns the same blocks as `CachingAllocator`, request by request, in a fifth of the time. Four properties allow it:

- The remainder of every block is split off, from 512 bytes on. So a block in use is as large as its request, rounded
  up to 512 bytes, and allocated memory equals rounded requests.
- Free neighbors are always merged, and so are unmapped ones. A free block is two places, its begin and its end, and
  needs no linked objects.
- Free blocks of equal size are ordered by address: segments get ever higher addresses, and addresses are never reused.
- `max_split_size` is unlimited: every free block that is large enough can serve a request.

Sizes and places are counted in blocks of 512 bytes. Every pool of every CUDA stream has a separate range of places; its
segments begin at a multiple of a page, one page apart. Nearly all requests are made on the default stream, so its pools
are attributes. 2.12 decides between equal blocks by the order in which they were created, which places do not have:
`serves` returns False.

Source: torch c10/cuda/CUDACachingAllocator.cpp: get_free_block, try_allocate_expandable_block, map_block, unmap_block,
free_block, as modelled by `expandable` and `best_fit` of this package.
"""

# ruff: noqa: C901, PLR0912, PLR0915, PLR1730 - `play` is one loop that runs for every request: calls would double its time

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from memcalc.allocator.driver import UNKNOWN_CAPACITY
from memcalc.allocator.pytorch.constants import (
    HEADROOM,
    LARGE_SEGMENT,
    MIN_BLOCK,
    SMALL_REQUEST,
    SMALL_SEGMENT,
    STREAM_SHIFT,
)
from memcalc.allocator.pytorch.lean import PeakBytes
from memcalc.allocator.pytorch.settings import Settings
from memcalc.allocator.pytorch.versions import Version
from memcalc.allocator.sizes import multiple
from memcalc.errors import OutOfMemory

_BITS, _UP = MIN_BLOCK.bit_length() - 1, MIN_BLOCK - 1  # n + 511 >> 9 is n in blocks, rounded up
_SMALL = SMALL_REQUEST // MIN_BLOCK
_STREAM_BITS = STREAM_SHIFT - _BITS  # of a request in blocks: the bits above hold its stream
_OTHER_STREAM = 1 << _STREAM_BITS
_SHIFT = 64  # the sort key of a free block is one integer: its size above its place
_PLACE = (1 << _SHIFT) - 1


class _ExpandablePool:
    """The free and unmapped blocks of one pool.

    Args:
        page: blocks mapped at once.
        capacity: blocks of the device.
    """

    __slots__ = ("edges", "keys", "page", "segments", "space", "unmapped")

    def __init__(self, page: int, capacity: int) -> None:
        self.page = page
        self.space = capacity + capacity // HEADROOM  # address space of a segment, before it is rounded up to pages
        self.keys: list[int] = []  # of the free blocks, sorted
        self.edges: dict[int, int] = {}  # begin of each free block -> its end, and its end -> its begin
        self.unmapped: dict[int, int] = {}  # begin of each unmapped block -> its end
        self.segments: dict[int, int] = {}  # begin of each segment -> its end, in the order of reservation

    def add(self, begin: int, end: int) -> None:
        """Add a free block."""
        self.edges[begin], self.edges[end] = end, begin
        insort(self.keys, (end - begin << _SHIFT) + begin)

    def remove(self, begin: int, end: int) -> None:
        """Remove a free block."""
        del self.edges[begin], self.edges[end]
        del self.keys[bisect_left(self.keys, (end - begin << _SHIFT) + begin)]

    def least_free(self, request: int) -> int:
        """Return the begin of the lowest run of free and unmapped blocks with room for a request.

        At most one free block precedes the first unmapped one. If no run has room, a new segment is reserved.
        """
        for unmapped in sorted(self.unmapped):
            begin = at = self.edges.get(unmapped, unmapped)
            while at - begin < request:
                after = self.unmapped.get(at) or self.edges.get(at, 0)
                if after <= at:  # a block in use, or the end of the segment
                    break
                at = after
            if at - begin >= request:
                return begin
        end = next(reversed(self.segments.values()), -self.page)
        begin = end + self.page
        self.segments[begin] = self.unmapped[begin] = begin + multiple(max(self.space, request), self.page)
        return begin

    def room_above(self) -> int:
        """Return the unmapped blocks at the end of the only segment; -1 if there are others."""
        if len(self.segments) != 1 or len(self.unmapped) != 1:
            return -1
        (last,), ((begin, end),) = self.segments.values(), self.unmapped.items()
        return end - begin if end == last else -1

    def unmap(self) -> int:
        """Unmap the whole pages in free blocks; return the number of 512-byte blocks of memory released.

        The remainders of a free block before and after its pages stay free. A segment without memory is dropped.
        """
        released = 0
        for key in [*self.keys]:
            begin = key & _PLACE
            end = begin + (key >> _SHIFT)
            first, last = multiple(begin, self.page), end // self.page * self.page
            if first >= last:
                continue
            self.remove(begin, end)
            if begin < first:
                self.add(begin, first)
            if last < end:
                self.add(last, end)
            released += last - first
            first = next((place for place, after in self.unmapped.items() if after == first), first)
            self.unmapped[first] = last = self.unmapped.pop(last, last)
            if self.segments.get(first) == last:
                del self.unmapped[first], self.segments[first]
        return released


class LeanExpandableAllocator:
    """The allocator of a device with expandable segments.

    Args:
        usable_bytes: bytes of the device that the allocator can use; None for no limit.
        capacity: bytes of the device, which determine the address space of a segment; None: the same as `usable_bytes`.
    """

    def __init__(self, usable_bytes: int | None = None, capacity: int | None = None) -> None:
        self.capacity = usable_bytes
        self.peak_reserved_bytes = self.reserved_bytes = 0
        self.retries = 0  # how often the cache was emptied for a request, as num_alloc_retries
        if capacity is None:
            capacity = UNKNOWN_CAPACITY if usable_bytes is None else max(usable_bytes, 0)
        self._capacity = capacity // MIN_BLOCK
        self._small, self._large = self._two_pools()
        self._others: dict[int, tuple[_ExpandablePool, _ExpandablePool]] = {}  # small and large blocks of other streams
        self._allocated = 0
        # Place and size of every block so far, and its stream if it is not the default one.
        self._places: list[int] = []
        self.block_sizes: list[int] = []
        # Requests that changed reserved memory: number, and reserved bytes after it.
        self.growth: list[tuple[int, int]] = []
        self._streams: dict[int, int] = {}
        self._largest = 0  # key of the largest block since `watch` that served a request and could not grow
        self._watched = 0  # allocated at `watch`
        self._has_emptied = False

    @staticmethod
    def serves(settings: Settings, version: Version) -> bool:
        """Return whether this allocator models a run with these settings."""
        return settings == Settings(expandable_segments=True, notes=settings.notes) and version.tie_break != "block"

    def play(self, script: Iterable[int]) -> PeakBytes:
        """Serve requests; see `LeanAllocator.play`.

        Raises:
            OutOfMemory: a request does not fit, even after the cache is emptied.
        """
        small, large = ((pool.keys, pool.edges, pool.unmapped) for pool in (self._small, self._large))
        places, taken, streams = self._places, self.block_sizes, self._streams
        allocated = most = self._allocated
        largest = self._largest
        for change in script:
            if change > 0:
                request = (change + _UP) >> _BITS
                stream = 0
                if request > _SMALL:
                    if request >= _OTHER_STREAM:
                        stream = request >> _STREAM_BITS
                        request &= _OTHER_STREAM - 1
                        pool = self._pools(stream)[request > _SMALL]
                        keys, edges, unmapped = pool.keys, pool.edges, pool.unmapped
                        streams[len(places)] = stream
                    else:
                        keys, edges, unmapped = large
                else:
                    keys, edges, unmapped = small
                at = bisect_left(keys, request << _SHIFT)
                try:
                    key = keys[at]
                except IndexError:  # no free block is large enough
                    place, end = self._fetch(self._pools(stream)[request > _SMALL], request)
                else:
                    place = key & _PLACE
                    end = place + (key >> _SHIFT)
                    # A block that can grow counts with the size that it can grow to, so that other blocks are filled
                    # first.
                    while end in unmapped and at + 1 < len(keys):
                        other = keys[at + 1]
                        begin = other & _PLACE
                        after = begin + (other >> _SHIFT)
                        if unmapped.get(after, after) - begin >= unmapped[end] - place:
                            break
                        at, key, place, end = at + 1, other, begin, after
                    if key > largest and end not in unmapped:
                        largest = key
                    del keys[at], edges[place]
                begin = place + request
                if begin < end:
                    edges[begin], edges[end] = end, begin
                    insort(keys, (end - begin << _SHIFT) + begin)
                else:
                    del edges[end]
                allocated += request
                if allocated > most:
                    most = allocated
                places.append(place)
                taken.append(request)
            elif change:
                number = ~change
                begin, request = places[number], taken[number]
                if number in streams:
                    pool = self._pools(streams[number])[request > _SMALL]
                    keys, edges = pool.keys, pool.edges
                else:
                    keys, edges, _ = large if request > _SMALL else small
                allocated -= request
                end = begin + request
                if end in edges:
                    after = edges.pop(end)
                    del keys[bisect_left(keys, (after - end << _SHIFT) + end)]
                    end = after
                if begin in edges:
                    before = edges.pop(begin)
                    del keys[bisect_left(keys, (begin - before << _SHIFT) + before)]
                    begin = before
                edges[begin], edges[end] = end, begin
                insort(keys, (end - begin << _SHIFT) + begin)
            else:
                places.append(0)
                taken.append(0)
        self._allocated, self._largest = allocated, largest
        return PeakBytes(most * MIN_BLOCK, most * MIN_BLOCK)

    def empty_cache(self) -> None:
        """Unmap the whole pages of free blocks."""
        self._has_emptied = True
        for pool in self._all_pools():
            self.reserved_bytes -= pool.unmap() * MIN_BLOCK

    def watch(self) -> None:
        """Begin to record the data that `would_repeat` needs about the requests that follow."""
        self._watched, self._largest = self._allocated, 0

    def would_repeat(self, carried: Callable[[], Sequence[tuple[int, int]] | None], /) -> bool:
        """Return whether the requests since `watch`, if repeated, would certainly get the same blocks.

        While a pool is one segment that is mapped from its begin on, only the last free block can grow. It can grow
        beyond the size of any other block, so it serves a request only if no other block can, regardless of how much of
        it is mapped. So if the same blocks are in use as at `watch`, all requests get the same blocks.

        Args:
            carried: as for `LeanAllocator.would_repeat`.
        """
        if self._has_emptied or self._watched != self._allocated:
            return False
        used = (pool for pool in self._all_pools() if pool.segments)
        if any(pool.room_above() <= self._largest >> _SHIFT for pool in used):
            return False
        pairs = carried()
        # With the same bytes in use, only blocks of the pairs and earlier blocks can be in use.
        return pairs is not None and all(self._block(one) == self._block(other) for one, other in pairs)

    def _block(self, number: int) -> tuple[int, int, int]:
        return self._places[number], self.block_sizes[number], self._streams.get(number, 0)

    def _all_pools(self) -> Iterable[_ExpandablePool]:
        return chain((self._large, self._small), *self._others.values())

    def _two_pools(self) -> tuple[_ExpandablePool, _ExpandablePool]:
        """Return new pools for small and for large blocks."""
        small, large = (_ExpandablePool(page // MIN_BLOCK, self._capacity) for page in (SMALL_SEGMENT, LARGE_SEGMENT))
        return small, large

    def _pools(self, stream: int) -> tuple[_ExpandablePool, _ExpandablePool]:
        if not stream:
            return self._small, self._large
        if stream not in self._others:
            self._others[stream] = self._two_pools()
        return self._others[stream]

    def _fetch(self, pool: _ExpandablePool, request: int) -> tuple[int, int]:
        """Return the begin and end of a block with newly mapped memory, without its key and its first edge."""
        block = self._grow(pool, request)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._grow(pool, request)
        if block is None:
            raise OutOfMemory(f"{request * MIN_BLOCK} bytes do not fit next to {self.reserved_bytes} reserved bytes.")
        self.growth.append((len(self._places), self.reserved_bytes))
        begin, end = block
        pool.remove(begin, end)
        pool.edges[end] = begin
        return begin, end

    def _grow(self, pool: _ExpandablePool, request: int) -> tuple[int, int] | None:
        """Return a free block with enough mapped pages for a request; None if there is no memory for its pages.

        Pages that were mapped before memory ran out stay, as a free block.
        """
        begin = pool.least_free(request)
        end = pool.edges.get(begin, begin)
        while end - begin < request:
            limit = pool.unmapped[end]
            mapped = min(end + multiple(begin + request - end, pool.page), limit)
            self.reserved_bytes += (mapped - end) * MIN_BLOCK
            if self.capacity is not None and self.reserved_bytes > self.capacity:
                self.reserved_bytes -= (mapped - end) * MIN_BLOCK
                return None
            self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
            del pool.unmapped[end]
            if mapped < limit:
                pool.unmapped[mapped] = limit
            if begin < end:
                pool.remove(begin, end)
            end = mapped
            if end in pool.edges:
                after = pool.edges[end]
                pool.remove(end, after)
                end = after
            pool.add(begin, end)
        return begin, end
