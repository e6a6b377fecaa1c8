"""The lean allocator beside the whole one: the same block for every request, whatever came before."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.allocator.blocks import Block
from memcalc.allocator.driver import Driver
from memcalc.allocator.pytorch.caching import CachingAllocator
from memcalc.allocator.pytorch.lean import LeanAllocator
from memcalc.allocator.pytorch.settings import parse_settings
from memcalc.allocator.pytorch.versions import parse_version
from memcalc.errors import OutOfMemory
from memcalc.events import Event, EventType
from tests.allocator.running import MIB, VERSIONS
from tests.allocator.streams import event_streams
from tests.properties.specs import examples
from tests.thinning import quick_every

SERVED = [version for version in VERSIONS if version != "2.12"]
GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())


class Both:
    """Both allocators, held equal after every request."""

    def __init__(self, version: str, room: int | None = None) -> None:
        parsed = parse_version(version)
        self.lean, self.whole = LeanAllocator(parsed, room), CachingAllocator(version=parsed, driver=Driver(room))
        self.blocks: list[Block | None] = []
        self.asked = 0

    def play(self, change: int) -> bool:
        """One request of a script; whether there was room for it."""
        before = self.whole.counters.allocated_bytes
        asked = self.asked
        if change > 0:
            try:
                self.blocks.append(self.whole.malloc(change))
            except OutOfMemory:
                with pytest.raises(OutOfMemory):
                    self.lean.play([change])
                return False
            self.asked += -(-change // 512) * 512
        elif change:
            block = self.blocks[~change]
            assert block is not None
            self.asked -= -(-block.requested // 512) * 512
            self.whole.free(block)
        else:
            self.blocks.append(None)
        highest = self.lean.play([change])
        assert highest == (max(before, self.whole.counters.allocated_bytes), max(asked, self.asked))
        reserved = self.whole.counters.reserved
        assert (self.lean.reserved_bytes, self.lean.peak_reserved_bytes) == (reserved.current, reserved.peak)
        if change > 0:
            self._same_place()
        return True

    def _same_place(self) -> None:
        """The newest block is in the same segment, at the same offset, and as large."""
        block, place = self.blocks[-1], self.lean._places[-1]
        assert block is not None
        begin = max(each for each in self.lean._segments if each <= place)
        number = [*self.lean._segments].index(begin)
        segments = (segment for pool in self.whole.default for segment in pool.segments)
        order = sorted(segment.number for segment in segments)
        expected = (order.index(block.segment.number), block.address - block.segment.address, block.size)
        assert (number, (place - begin) * 512, self.lean.block_sizes[-1] * 512) == expected

    def end(self) -> None:
        """The same free blocks in the same order, and indices of them that agree."""
        lean, default = self.lean, self.whole.default
        for pool, kept in ((default.small, lean._small), (default.large, lean._large)):
            sizes = [size * 512 for size in kept.sizes for _ in kept.places[size]]
            assert [block.size for block in pool.free_blocks()] == sizes
        free = sorted(
            (at, size) for kept in (lean._small, lean._large) for size in kept.sizes for at in kept.places[size]
        )
        assert free == sorted(lean._starts.items())
        assert free == sorted((begin, end - begin) for end, begin in lean._ends.items())
        assert all(one + size < other for (one, size), (other, _) in pairwise(free))


def script_of(events: list[Event]) -> Iterator[int]:
    """The events' allocations and releases."""
    numbers: dict[int, int] = {}
    for event in events:
        if event.kind is EventType.ALLOC:
            numbers[event.storage] = len(numbers)
            yield event.bytes
        elif event.kind is EventType.FREE:
            yield ~numbers[event.storage]


@examples(150)
@given(event_streams(), st.sampled_from(SERVED))
def test_any_stream(events: list[Event], version: str) -> None:
    both = Both(version)
    for change in script_of(events):
        both.play(change)
    both.end()


def walk(seed: int, count: int) -> Iterator[int]:
    """Requests of few sizes, as identical layers make them, and now and then of any; freed in random order."""
    chance = random.Random(seed)
    sizes = [int(2 ** chance.uniform(4, 27)) for _ in range(8)] + [0, 512, MIB, MIB + 1, 10 * MIB, 20 * MIB]
    alive: list[int] = []
    number = 0
    growing = 0.6
    for at in range(count):
        if at % 100 == 0:
            growing = chance.choice([0.2, 0.5, 0.6, 0.8])
        if alive and chance.random() > growing:
            yield ~alive.pop(chance.randrange(len(alive)))
            continue
        size = chance.choice(sizes) if chance.random() < 0.9 else int(2 ** chance.uniform(0, 28))
        if size:
            alive.append(number)
        number += 1
        yield size


@pytest.mark.parametrize("version", ["2.11", "2.13"])
@pytest.mark.parametrize("seed", quick_every(3, range(12)))
def test_long_streams_of_few_sizes(seed: int, version: str) -> None:
    both = Both(version)
    for change in walk(seed, 1500):
        both.play(change)
    both.end()


@pytest.mark.parametrize("case", [case for case in GOLDEN["cases"] if not case["config"].get("alloc_conf")])
def test_golden_streams(case: dict[str, list[list[list[object]]]]) -> None:
    """What the released wheels were given, as far as one stream asks for it on a device without end."""
    events = []
    for (name, *arguments), *_ in case["rows"]:
        if name == "alloc":
            events.append(Event(EventType.ALLOC, int(str(arguments[0])), int(str(arguments[1]))))
        elif name == "free":
            events.append(Event(EventType.FREE, int(str(arguments[0]))))
    for version in ("2.11", "2.13"):
        both = Both(version)
        for change in script_of(events):
            both.play(change)
        both.end()


@pytest.mark.parametrize("version", ["2.11", "2.13"])
@pytest.mark.parametrize("seed", quick_every(3, range(12)))
def test_a_device_that_runs_full(seed: int, version: str) -> None:
    """The cache is emptied, again and again, until that does not help: both die at the same request."""
    script = [*walk(seed, 800)]
    endless = LeanAllocator(parse_version(version))
    endless.play(script)
    retries = deaths = 0
    for percent in (30, 60, 80, 90, 96):
        both = Both(version, endless.reserved_bytes * percent // 100)
        lived = all(both.play(change) for change in script)
        assert both.lean.retries == both.whole.counters.num_alloc_retries
        retries += both.lean.retries
        deaths += not lived
        if lived:
            both.end()
    assert retries > deaths > 0 or seed


def test_settings_and_releases_that_it_does_not_serve() -> None:
    version = parse_version("2.13")
    assert LeanAllocator.serves(parse_settings("", version), version)
    assert LeanAllocator.serves(parse_settings("pinned_use_background_threads:True", version), version)
    assert not LeanAllocator.serves(parse_settings("expandable_segments:True", version), version)
    assert not LeanAllocator.serves(parse_settings("", version), parse_version("2.12"))


def test_beyond_every_device() -> None:
    """Three requests of a pebibyte and more have segments of their own."""
    lean = LeanAllocator(parse_version("2.13"))
    lean.play([2**50, 2**53, 2**62, ~1, ~0, ~2, 2**53])
    assert lean.reserved_bytes == 2**50 + 2**53 + 2**62
