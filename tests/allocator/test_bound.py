"""The upper bound of reserved memory: worked by hand, and never below what random streams reserve."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.allocator.pytorch.bound import most_reserved
from memcalc.allocator.pytorch.lean import LeanAllocator
from memcalc.allocator.pytorch.versions import parse_version
from memcalc.events import Event
from tests.allocator.running import MIB
from tests.allocator.streams import event_streams
from tests.allocator.test_lean import script_of, walk
from tests.properties.specs import examples
from tests.thinning import quick_every


def reserved(script: list[int], version: str = "2.13") -> int:
    """Bytes that the replay reserves."""
    allocator = LeanAllocator(parse_version(version))
    allocator.play(script)
    return allocator.peak_reserved_bytes


@pytest.mark.parametrize(
    ("script", "found", "bound"),
    [
        ([], 0, 0),
        ([0], 0, 0),
        ([512, 512, 512], 2 * MIB, 6 * MIB),
        ([30 * MIB, ~0, 30 * MIB, ~1, 30 * MIB, ~2], 30 * MIB, 60 * MIB),  # never two at once: one more than one
        # 40 in use keep two of 30 from nothing, but 12 lie in 30 when it is free: then another 30 is needed.
        ([40 * MIB, 30 * MIB, ~1, 12 * MIB, 30 * MIB], 100 * MIB, 40 * MIB + 2 * 30 * MIB + 12 * MIB),
        # Small requests of the large pool count with every size: 12 MiB is taken by 3, and needed again.
        ([12 * MIB, ~0, 3 * MIB, 12 * MIB, ~2, 12 * MIB], 24 * MIB, 3 * 12 * MIB + 20 * MIB),
    ],
)
def test_by_hand(script: list[int], found: int, bound: int) -> None:
    assert (reserved(script), most_reserved([script])) == (found, bound)


@examples(300)
@given(event_streams(), st.sampled_from(["2.11", "2.13"]))
def test_any_stream(events: list[Event], version: str) -> None:
    script = [*script_of(events)]
    assert reserved(script, version) <= most_reserved([script])


@pytest.mark.parametrize("seed", quick_every(4, range(40)))
def test_long_streams_of_few_sizes(seed: int) -> None:
    script = [*walk(seed, 2000)]
    assert reserved(script) <= most_reserved([script])


@pytest.mark.parametrize("seed", range(20))
def test_streams_that_break_up_what_is_free(seed: int) -> None:
    """All is freed but for a few blocks here and there, and larger ones are requested: what fragments most."""
    chance = random.Random(seed)
    script: list[int] = []
    number, size = 0, 1.1
    while size < 200:
        alive = []
        for _ in range(chance.randrange(5, 40)):
            script.append(int(size * MIB))
            alive.append(number)
            number += 1
        kept = chance.sample(alive, len(alive) // chance.randrange(3, 9))
        script += [~each for each in alive if each not in kept]
        size *= chance.uniform(1.1, 2.5)
    assert reserved(script) <= most_reserved([script])
