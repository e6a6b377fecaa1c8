"""The lean allocators with requests of several CUDA streams, beside the whole one."""

from __future__ import annotations

import random
from itertools import product

import pytest

from memcalc.allocator.driver import Driver
from memcalc.allocator.pytorch.bound import most_reserved
from memcalc.allocator.pytorch.caching import CachingAllocator
from memcalc.allocator.pytorch.constants import STREAM_SHIFT
from memcalc.allocator.pytorch.lean import LeanAllocator
from memcalc.allocator.pytorch.lean_expandable import LeanExpandableAllocator
from memcalc.allocator.pytorch.settings import Settings
from memcalc.allocator.pytorch.versions import parse_version
from memcalc.errors import OutOfMemory
from tests.thinning import quick_every

MIB = 2**20


def script_of(seed: int) -> list[int]:
    """Requests of three streams, of small, large and very large blocks, nearly half of them freed again."""
    lot = random.Random(seed)
    script: list[int] = []
    live: list[int] = []
    count = 0
    for _ in range(lot.randint(5, 150)):
        if live and lot.random() < 0.45:
            script.append(~live.pop(lot.randrange(len(live))))
            continue
        size = lot.choice((lot.randint(1, MIB), lot.randint(MIB, 12 * MIB), lot.randint(10 * MIB, 64 * MIB)))
        script.append(size + (lot.choice((0, 0, 1, 2)) << STREAM_SHIFT))
        live.append(count)
        count += 1
    return script


def whole(
    script: list[int], version: str, room: int | None, settings: Settings | None = None
) -> tuple[int, int] | None:
    """Peak of reserved bytes and retries; None: out of memory."""
    allocator = CachingAllocator(settings or Settings(), parse_version(version), Driver(room))
    blocks = []
    try:
        for change in script:
            if change > 0:
                stream = change >> STREAM_SHIFT
                blocks.append(allocator.malloc(change - (stream << STREAM_SHIFT), stream))
            else:
                allocator.free(blocks[~change])
    except OutOfMemory:
        return None
    return allocator.counters.reserved.peak, allocator.counters.num_alloc_retries


def lean(script: list[int], version: str, room: int | None) -> tuple[int, int] | None:
    """The same of the lean one."""
    allocator = LeanAllocator(parse_version(version), room)
    try:
        allocator.play(script)
    except OutOfMemory:
        return None
    return allocator.peak_reserved_bytes, allocator.retries


@pytest.mark.parametrize("seed", quick_every(4, range(60)))
def test_both_reserve_the_same(seed: int) -> None:
    script = script_of(seed)
    for version, room in product(("2.11", "2.13"), (None, 200 * MIB, 400 * MIB)):
        assert lean(script, version, room) == whole(script, version, room)


@pytest.mark.parametrize("seed", quick_every(4, range(60)))
def test_both_reserve_the_same_with_segments_that_expand(seed: int) -> None:
    """And with a cache that is emptied in between."""
    script, settings = script_of(seed), Settings(expandable_segments=True)
    for version, room in product(("2.11", "2.13"), (None, 200 * MIB, 400 * MIB)):
        allocator = LeanExpandableAllocator(room)
        expected = whole(script, version, room, settings)
        if expected is None:
            with pytest.raises(OutOfMemory):
                allocator.play(script)
            continue
        allocator.play(script)
        assert (allocator.peak_reserved_bytes, allocator.retries) == expected


@pytest.mark.parametrize("seed", quick_every(4, range(60)))
def test_an_emptied_cache_with_segments_that_expand(seed: int) -> None:
    script = script_of(seed)
    middle = len(script) // 2
    lean, whole = LeanExpandableAllocator(), CachingAllocator(Settings(expandable_segments=True))
    blocks = []
    for part in (script[:middle], script[middle:]):
        lean.play(part)
        for change in part:
            if change > 0:
                stream = change >> STREAM_SHIFT
                blocks.append(whole.malloc(change - (stream << STREAM_SHIFT), stream))
            else:
                whole.free(blocks[~change])
        assert lean.reserved_bytes == whole.counters.reserved.current
        lean.empty_cache()
        whole.empty_cache()
        assert lean.reserved_bytes == whole.counters.reserved.current


@pytest.mark.parametrize("seed", quick_every(4, range(60)))
def test_no_stream_reserves_more_than_the_bound(seed: int) -> None:
    script = script_of(seed)
    found = lean(script, "2.13", None)

    assert found is not None
    assert found[0] <= most_reserved([script])


def test_a_stream_does_not_take_what_another_has_freed() -> None:
    """30 MiB, freed, and 30 MiB again: one segment on one stream, two on two."""
    again = [30 * MIB, ~0, 30 * MIB]
    other = [30 * MIB, ~0, (30 * MIB) + (1 << STREAM_SHIFT)]

    assert lean(again, "2.13", None) == (30 * MIB, 0)
    assert lean(other, "2.13", None) == (60 * MIB, 0)
