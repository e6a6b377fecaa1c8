"""The lean allocator with expandable segments beside the whole one: the same block for every request."""

from __future__ import annotations

import json
import random
from bisect import bisect_right
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.allocator.blocks import Block
from memcalc.allocator.driver import Driver
from memcalc.allocator.pools import Pool
from memcalc.allocator.pytorch.caching import CachingAllocator
from memcalc.allocator.pytorch.lean_expandable import LeanExpandableAllocator, _ExpandablePool
from memcalc.allocator.pytorch.settings import Settings, parse_settings
from memcalc.allocator.pytorch.versions import parse_version
from memcalc.errors import OutOfMemory
from memcalc.events import Event, EventType
from tests.allocator.running import MIB
from tests.allocator.streams import event_streams
from tests.allocator.test_lean import SERVED, script_of, walk
from tests.properties.specs import examples
from tests.thinning import quick_every

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
EXPANDABLE = "expandable_segments:True"


class Both:
    """Both allocators, held equal after every request."""

    def __init__(self, version: str, room: int | None = None) -> None:
        parsed = parse_version(version)
        self.lean = LeanExpandableAllocator(room)
        self.whole = CachingAllocator(Settings(expandable_segments=True), parsed, Driver(room))
        self.blocks: list[Block | None] = []

    def play(self, change: int) -> bool:
        """One request of a script; whether there was room for it."""
        before = self.whole.counters.allocated_bytes
        if change > 0:
            try:
                self.blocks.append(self.whole.malloc(change))
            except OutOfMemory:
                with pytest.raises(OutOfMemory):
                    self.lean.play([change])
                self._same_counters()
                return False
        elif change:
            block = self.blocks[~change]
            assert block is not None
            self.whole.free(block)
        else:
            self.blocks.append(None)
        most = max(before, self.whole.counters.allocated_bytes)
        assert self.lean.play([change]) == (most, most)
        self._same_counters()
        if change > 0:
            self._same_place()
        return True

    def _same_counters(self) -> None:
        counters = self.whole.counters
        assert (self.lean.reserved_bytes, self.lean.peak_reserved_bytes) == (
            counters.reserved.current,
            counters.reserved.peak,
        )
        assert self.lean.retries == counters.num_alloc_retries

    def _same_place(self) -> None:
        """The newest block is in the same segment of its pool, at the same offset, and as large."""
        block, begin = self.blocks[-1], self.lean._places[-1]
        assert block is not None
        pool = self.lean._small if block.free_set.pool.small else self.lean._large
        assert of_lean(pool, [(begin, begin + self.lean.block_sizes[-1])]) == of_whole(block.free_set.pool, [block])

    def end(self) -> None:
        """The same free blocks, in the same order, and unmapped ones, and indices of them that agree."""
        default = self.whole.default
        for whole, lean in ((default.small, self.lean._small), (default.large, self.lean._large)):
            free = [(key % 2**64, lean.edges[key % 2**64]) for key in lean.keys]
            assert of_lean(lean, free) == of_whole(whole, whole.free_blocks())
            assert lean.edges == dict(free) | {end: begin for begin, end in free}
            unmapped = [block for shelf in whole.free_sets.values() for _, block in shelf.unmapped]
            assert of_lean(lean, sorted(lean.unmapped.items())) == of_whole(whole, unmapped)
            for blocks in (free, lean.unmapped.items()):
                assert all(end < begin for (_, end), (begin, _) in pairwise(sorted(blocks)))


def of_lean(pool: _ExpandablePool, blocks: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Of each block the number of its segment, its offset there and its size in bytes."""
    begins = sorted(pool.segments)
    numbers = [bisect_right(begins, begin) - 1 for begin, _ in blocks]
    return [
        (i, (begin - begins[i]) * 512, (end - begin) * 512) for i, (begin, end) in zip(numbers, blocks, strict=True)
    ]


def of_whole(pool: Pool, blocks: list[Block]) -> list[tuple[int, int, int]]:
    """The same of the whole allocator's blocks."""
    numbers = sorted(segment.number for segment in pool.segments)
    return [
        (numbers.index(block.segment.number), block.address - block.segment.address, block.size) for block in blocks
    ]


@examples(150)
@given(event_streams(), st.sampled_from(SERVED), st.sampled_from([None, 100, 300, 1000]))
def test_any_stream(events: list[Event], version: str, room: int | None) -> None:
    both = Both(version, None if room is None else room * MIB)
    if all(both.play(change) for change in script_of(events)):
        both.end()


@pytest.mark.parametrize("version", ["2.11", "2.13"])
@pytest.mark.parametrize("seed", quick_every(3, range(12)))
def test_long_streams_of_few_sizes(seed: int, version: str) -> None:
    both = Both(version)
    for change in walk(seed, 1500):
        both.play(change)
    both.end()


@pytest.mark.parametrize("case", [case for case in GOLDEN["cases"] if case["config"] == {"alloc_conf": EXPANDABLE}])
@pytest.mark.parametrize("room", [None, 400 * MIB, GOLDEN["device_total"]])
def test_golden_streams(case: dict[str, list[list[list[object]]]], room: int | None) -> None:
    """What the released wheels were given, as far as one stream asks for it."""
    events = []
    for (name, *arguments), *_ in case["rows"]:
        if name == "alloc":
            events.append(Event(EventType.ALLOC, int(str(arguments[0])), int(str(arguments[1]))))
        elif name == "free":
            events.append(Event(EventType.FREE, int(str(arguments[0]))))
    for version in ("2.11", "2.13"):
        both = Both(version, room)
        if all(both.play(change) for change in script_of(events)):
            both.end()


@pytest.mark.parametrize("version", ["2.11", "2.13"])
@pytest.mark.parametrize("seed", quick_every(3, range(12)))
def test_a_device_that_runs_full(seed: int, version: str) -> None:
    """Pages are freed to the driver until that does not help: both run out of memory at the same request."""
    script = [*walk(seed, 800)]
    endless = LeanExpandableAllocator()
    endless.play(script)
    retries = deaths = 0
    for percent in (30, 60, 80, 90, 96, 99):
        both = Both(version, endless.peak_reserved_bytes * percent // 100)
        lived = all(both.play(change) for change in script)
        retries += both.lean.retries
        deaths += not lived
        if lived:
            both.end()
    assert retries >= deaths


def test_a_device_that_is_always_full() -> None:
    """Pages in every corner are unmapped and mapped again."""
    helped = 0
    for seed in range(40):
        both = Both("2.13", 200 * MIB)
        chance = random.Random(seed)
        alive: list[int] = []
        lived = True
        while lived and len(both.blocks) < 300:
            size = int(2 ** chance.uniform(9, 26))
            if alive and both.whole.counters.allocated_bytes + size > 170 * MIB:
                both.play(~alive.pop(chance.randrange(len(alive))))
            else:
                lived = both.play(size)
                alive.append(len(both.blocks) - 1)
        if lived:
            both.end()
        helped += both.lean.retries - (not lived)
    assert helped


def test_a_second_segment() -> None:
    """Addresses for 160 + 160/8 MiB are 9 pages of 20. Two holes of two pages each do not serve 50 MiB."""
    both = Both("2.13", 160 * MIB)
    for change in (40, 20, 40, 20, 40):
        both.play(change * MIB)
    segments = []
    for change in (~0, ~2, 50 * MIB, 18 * MIB, ~5, 15 * MIB, ~6, ~7, 70 * MIB, ~8, ~1, ~3, ~4, 120 * MIB):
        assert both.play(change)
        both.end()
        segments.append(len(both.lean._large.segments))
    assert (max(segments), segments[-1], both.lean.retries) == (2, 1, 3)


def test_the_worked_example() -> None:
    """As `tests.allocator.test_expandable` has it, up to the first emptied cache. Reserved memory in MiB."""
    lean = LeanExpandableAllocator()
    reserved = []
    for change in (512, 3 * MIB, 18 * MIB, 30 * MIB, ~2, 19 * MIB, ~3, 60 * MIB):
        lean.play([change])
        reserved.append(lean.reserved_bytes // MIB)
    assert reserved == [2, 22, 42, 62, 62, 82, 82, 142]


def test_settings_and_releases_that_it_does_not_serve() -> None:
    version = parse_version("2.13")
    serves = LeanExpandableAllocator.serves
    assert serves(parse_settings(EXPANDABLE, version), version)
    assert serves(parse_settings(f"{EXPANDABLE},pinned_use_background_threads:True", version), version)
    assert not serves(parse_settings("", version), version)
    assert not serves(parse_settings(f"{EXPANDABLE},max_split_size_mb:64", version), version)
    assert not serves(parse_settings(EXPANDABLE, version), parse_version("2.12"))


def test_beyond_every_device() -> None:
    """A device that never runs out has address space for requests of a pebibyte and more."""
    lean = LeanExpandableAllocator()
    lean.play([2**50, 2**53, 2**62, ~1, ~0, ~2, 2**53])
    assert lean.reserved_bytes >= 2**50 + 2**53 + 2**62
