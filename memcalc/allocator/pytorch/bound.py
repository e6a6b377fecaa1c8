"""An upper bound of reserved memory that needs no replay: from the sizes of requests and how many are alive at once."""

from __future__ import annotations

from collections.abc import Iterable

from memcalc.allocator.pytorch.constants import LARGE_SEGMENT, SMALL_SEGMENT, STREAM_SHIFT
from memcalc.allocator.pytorch.rounding import block_size, segment_size


def most_reserved(scripts: Iterable[Iterable[int]]) -> int:
    """Bytes that default settings never reserve more than, on a device that never runs out, in any release.

    A request creates a segment only if its pool has no free block that is large enough. Let G be the size of the
    segment that it would create, and s <= G its own. An existing segment of size G of which nothing is in use is one
    free block, because free neighbours are merged, and G >= s: it would serve the request. So when a segment of size G
    is created, every other one of that size holds a block in use, for which at most G was asked, and no two of them
    the same one. Therefore there are never more segments of size G

    - than requests that would create one of that size, and
    - than one more than the requests of their pool, of at most G each, that are alive at once.

    Of the latter there are at most as many as the sum, over the sizes of segments up to G, of the most requests alive
    at once that would create that size: requests of 10 MiB and more create the next multiple of 2 MiB, which is beyond
    G only if the request is; smaller ones create 20 MiB, and are counted with every G. The number of segments of each
    size times that size is all that is reserved; an emptied cache only has fewer. Each CUDA stream has segments of its
    own.

    A device with room for this bound never empties its cache, so it is a bound there, too.

    Args:
        scripts: requests in order, as `LeanAllocator.play` takes them.
    """
    kinds: dict[int, int] = {0: 0}  # of each size that is asked for: the place of its segment's size in these lists
    segments, alive, most, made = [(0, 0)], [0], [0], [0]  # stream and size of segments
    places: list[int] = []  # of each request
    for script in scripts:
        for change in script:
            if change < 0:
                alive[places[~change]] -= 1
                continue
            if change not in kinds:
                stream = change >> STREAM_SHIFT
                segment = stream, segment_size(block_size(change - (stream << STREAM_SHIFT)))
                if segment not in segments:
                    for each in (alive, most, made):
                        each.append(0)
                    segments.append(segment)
                kinds[change] = segments.index(segment)
            place = kinds[change]
            places.append(place)
            made[place] += 1
            now = alive[place] = alive[place] + 1
            if now > most[place]:  # noqa: PLR1730 - once for each request: max() would cost a quarter of it
                most[place] = now
    total = 0
    found = sorted(zip(segments, most, made, strict=True))[1:]  # the first one has what asks for nothing
    for (stream, size), own, count in found:
        if size == SMALL_SEGMENT:
            rivals = own
        else:
            rivals = sum(
                most
                for (beside, other), most, _ in found
                if beside == stream and other != SMALL_SEGMENT and (other <= size or other == LARGE_SEGMENT)
            )
        total += size * min(count, rivals + 1)
    return total
