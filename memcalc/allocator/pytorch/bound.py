"""An upper bound of reserved memory without a replay: from the sizes of requests and how many are live at once."""

from __future__ import annotations

from collections.abc import Iterable

from memcalc.allocator.pytorch.constants import LARGE_SEGMENT, SMALL_SEGMENT, STREAM_SHIFT
from memcalc.allocator.pytorch.rounding import block_size, segment_size


def most_reserved(scripts: Iterable[Iterable[int]]) -> int:
    """Return an upper bound of the bytes reserved under default settings, for any version, on a GPU without limit.

    A request creates a segment only if its pool has no free block that is large enough. Let G be the size of the
    segment that it would create, and s <= G its own size. An existing segment of size G without a block in use is one
    free block, because free neighbors are merged, and G >= s: it would serve the request. So when a segment of size G
    is created, every other segment of that size has a block in use that was requested with at most G bytes, and no two
    of them share one. Therefore the number of segments of size G never exceeds

    - the number of requests that would create a segment of that size, nor
    - one more than the number of simultaneously live requests of their pool, of at most G bytes each.

    The latter number is at most the sum, over segment sizes up to G, of the peak number of live requests that would
    create that size: requests of 10 MiB and more create the next multiple of 2 MiB, which exceeds G only if the request
    does; smaller ones create 20 MiB, and are counted with every G. The bound is the sum of segment sizes times their
    numbers. Emptying the cache only reduces it. Each CUDA stream has separate segments.

    A device with enough memory for this bound never empties its cache, so the bound holds there, too.

    Args:
        scripts: requests in order, as `LeanAllocator.play` takes them.
    """
    kinds: dict[int, int] = {0: 0}  # each requested size -> index of its segment's size in these lists
    segments, alive, most, made = [(0, 0)], [0], [0], [0]  # stream and size of segments
    places: list[int] = []  # index of each request's segment size
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
    found = sorted(zip(segments, most, made, strict=True))[1:]  # without the first, which counts requests of 0 bytes
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
