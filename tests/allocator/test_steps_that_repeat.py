"""A repeated step gets the same blocks if the allocator's `would_repeat` returns True."""

from __future__ import annotations

import random
from functools import partial

import pytest

from memcalc.allocator.pytorch.constants import STREAM_SHIFT
from memcalc.allocator.pytorch.lean import LeanAllocator
from memcalc.allocator.pytorch.lean_expandable import LeanExpandableAllocator
from memcalc.allocator.pytorch.script_replay import FullScriptAllocator
from memcalc.allocator.pytorch.settings import parse_settings
from memcalc.allocator.pytorch.versions import parse_version
from memcalc.errors import OutOfMemory
from tests.allocator.running import MIB

Lean = LeanAllocator | LeanExpandableAllocator
STREAM = 1 << STREAM_SHIFT  # requests of another CUDA stream
SIZES = [512, 5 * 512, MIB, MIB + 512, 3 * MIB, 9 * MIB, 11 * MIB, 24 * MIB, 25 * MIB, 60 * MIB]


def allocators() -> dict[str, Lean]:
    """One of each kind; the small device's address space is too small for a block to be sure to grow furthest."""
    return {
        "default": LeanAllocator(parse_version("2.13")),
        "of addresses": LeanAllocator(parse_version("2.11")),
        "full": LeanAllocator(parse_version("2.13"), 200 * MIB),
        "expandable": LeanExpandableAllocator(),
        "expandable, small": LeanExpandableAllocator(400 * MIB),
    }


class Steps:
    """Random steps, each the one before once more: it frees what that one left, and leaves as much.

    Args:
        seed: of the random numbers.
        streams: the offsets of its requests' CUDA streams.
    """

    def __init__(self, seed: int, streams: tuple[int, ...] = (0,)) -> None:
        draw = random.Random(seed)
        self.before = [draw.choice(SIZES) for _ in range(draw.randrange(20))]
        kept = [number for number in range(len(self.before)) if draw.random() < 0.6]
        self.dropped = [number for number in range(len(self.before)) if number not in kept]
        carried = draw.randrange(3)
        self.carried = [len(self.before) + number for number in range(carried)]
        self.first = [draw.choice(SIZES) for _ in range(carried)]
        self.script: list[int] = []  # n > 0 requests; -1 - n frees its n-th request; None the next one carried over
        alive: list[int] = []
        number = 0
        sizes = draw.sample(SIZES, 4)
        for _ in range(draw.randrange(5, 60)):
            if alive and draw.random() < 0.5:
                self.script.append(~alive.pop(draw.randrange(len(alive))))
            else:
                self.script.append(draw.choice(sizes) + draw.choice(streams))
                alive.append(number)
                number += 1
        self.script += [~each for each in alive]
        self.left = [number + each for each in range(carried)]
        self.count = number + carried

    def requests(self) -> tuple[list[int], list[int], list[int]]:
        """Return the requests before the step, and the step twice, encoded."""
        begin = [*self.before, *self.first, *(~each for each in self.dropped)]
        return begin, self.step(self.carried, 0), self.step(self.replaced(0), 1)

    def replaced(self, number: int) -> list[int]:
        """Return the numbers of the requests of a step that stay allocated after it, instead of those that it frees."""
        return [self.base(number) + each for each in self.left]

    def base(self, number: int) -> int:
        """Return the number of requests before a step."""
        return len(self.before) + len(self.first) + number * self.count

    def step(self, carried: list[int], number: int) -> list[int]:
        """Return the requests of one step, which frees the carried blocks first and allocates as many at its end."""
        own = [change if change >= 0 else ~(~change + self.base(number)) for change in self.script]
        return [*(~each for each in carried), *own, *self.first]

    def pairs(self) -> list[tuple[int, int]]:
        """Return pairs: an earlier block that the first step frees, and the one that the second frees instead."""
        return list(zip(self.carried, self.replaced(0), strict=True))


def repeats(allocator: Lean, steps: Steps) -> bool | None:
    """Whether the allocator says that the step repeats; checked by making it once more. None: there is no room."""
    begin, first, second = steps.requests()
    try:
        allocator.play(begin)
        allocator.watch()
        top = allocator.play(first)
    except OutOfMemory:
        return None
    said = allocator.would_repeat(steps.pairs)
    reserved = allocator.peak_reserved_bytes
    if said:
        again = allocator.play(second)
        one, other = (slice(steps.base(number), steps.base(number + 1)) for number in (0, 1))
        assert allocator._places[one] == allocator._places[other]
        assert allocator.block_sizes[one] == allocator.block_sizes[other]
        assert again.allocated <= top.allocated
        assert again.requested <= top.requested
        assert allocator.peak_reserved_bytes == reserved
    return said


@pytest.mark.parametrize("kind", allocators())
@pytest.mark.parametrize("streams", [(0,), (0, STREAM)])
def test_a_step_that_is_said_to_repeat_repeats(kind: str, streams: tuple[int, ...]) -> None:
    """600 random steps; how often it is said shows that the test sees both answers."""
    said = [repeats(allocators()[kind], Steps(seed, streams)) for seed in range(600)]
    yes, no = said.count(True), said.count(False)
    assert no > 20
    assert yes == 0 if kind == "of addresses" else yes > 60


def test_a_later_segment_that_would_serve_an_earlier_request() -> None:
    """The first step has a block of 60 MiB for 11 MiB; then 24 MiB make a segment, which the second step prefers."""
    allocator = LeanAllocator(parse_version("2.13"))
    allocator.play([60 * MIB, ~0])
    allocator.watch()
    allocator.play([11 * MIB, 50 * MIB, 24 * MIB, ~1, ~2, ~3])
    assert allocator.would_repeat(list) is False
    begin = len(allocator._places)
    allocator.play([11 * MIB, 50 * MIB, 24 * MIB, *(~(begin + each) for each in range(3))])
    assert allocator._places[1:4] != allocator._places[begin:]


def test_a_later_segment_that_is_too_small_or_no_better() -> None:
    """12 MiB are too small for 20; 24 MiB in the older segment come before 24 MiB in the newer one."""
    allocator = LeanAllocator(parse_version("2.13"))
    allocator.play([24 * MIB, ~0])
    allocator.watch()
    allocator.play([20 * MIB, 12 * MIB, 24 * MIB, ~1, ~2, ~3])
    assert allocator.would_repeat(list) is True


@pytest.mark.parametrize("kind", ["default", "expandable"])
def test_what_is_in_use_has_to_be_the_same(kind: str) -> None:
    """A step that leaves a block, frees one of another size, or is followed by other requests does not repeat."""
    cases: list[tuple[list[int], list[tuple[int, int]] | None]] = [
        ([~0, 3 * MIB, 9 * MIB, ~2], [(0, 1)]),
        ([3 * MIB, ~1], None),
    ]
    for script, carried in cases:
        allocator = allocators()[kind]
        allocator.play([9 * MIB])
        allocator.watch()
        allocator.play(script)
        assert allocator.would_repeat(partial(_given, carried)) is False
    # One of two blocks of a size is replaced by another block of that size, elsewhere.
    allocator = allocators()[kind]
    allocator.play([9 * MIB, 9 * MIB])
    allocator.watch()
    allocator.play([9 * MIB, ~0])
    assert allocator.would_repeat(lambda: [(0, 2)]) is False
    # It is replaced by one at the same place of another stream's pool.
    allocator = allocators()[kind]
    allocator.play([9 * MIB + STREAM])
    allocator.watch()
    allocator.play([9 * MIB, ~0])
    assert allocator.would_repeat(lambda: [(0, 1)]) is False


def _given(pairs: list[tuple[int, int]] | None) -> list[tuple[int, int]] | None:
    return pairs


def test_where_it_is_not_known() -> None:
    version = parse_version("2.13")
    whole = FullScriptAllocator(parse_settings("max_split_size_mb:64", version), version, None, None)
    whole.watch()
    whole.play([MIB, ~0])
    assert whole.would_repeat(list) is False
    emptied = LeanExpandableAllocator()
    emptied.play([MIB, ~0])
    emptied.empty_cache()
    emptied.watch()
    emptied.play([MIB, ~1])
    assert emptied.would_repeat(list) is False
