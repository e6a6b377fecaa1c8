"""What holds after every operation, whatever the operations, the settings and the release."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from memcalc.allocator.blocks import FREE, UNMAPPED, Block
from memcalc.allocator.driver import GRANULE
from memcalc.allocator.pytorch.caching import CachingAllocator
from memcalc.allocator.sizes import multiple
from memcalc.allocator.snapshot import blocks_of
from memcalc.errors import OutOfMemory
from tests.allocator.running import MIB, VERSIONS, allocator
from tests.properties.specs import examples

CAPACITY = 500 * MIB
CONFIGS = [
    "",
    "expandable_segments:True",
    "max_split_size_mb:40",
    "expandable_segments:True,max_split_size_mb:25",
    "roundup_power2_divisions:[1:4,16:8,>:2]",
    "garbage_collection_threshold:0.4",
]

# (name, which of the living blocks, bytes, stream); what a step has no use for is ignored
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["alloc"] * 6 + ["free"] * 4 + ["record_stream", "empty_cache", "events"]),
        st.integers(0, 2**16),
        st.one_of(st.integers(1, MIB), st.integers(MIB, 12 * MIB), st.integers(10 * MIB, 120 * MIB), st.just(10 * MIB)),
        st.integers(0, 1),
    ),
    min_size=10,
    max_size=80,
)


def check(subject: CachingAllocator) -> None:
    """The state is sound."""
    physical = reserved = allocated = waiting = 0
    ranges = []
    for pair in (subject.default, *subject.private.pools.values()):
        for pool in pair:
            free: set[Block] = set()
            for segment in pool.segments:
                blocks = list(blocks_of(segment))
                assert blocks[0].address == segment.address
                assert blocks[-1].address + blocks[-1].size == segment.address + segment.size
                for left, right in pairwise(blocks):
                    assert left.address + left.size == right.address  # no gap, no overlap
                    assert right.previous is left
                    assert left.state != right.state or left.state not in {FREE, UNMAPPED}  # merged
                mapped = sum(block.size for block in blocks if block.state != UNMAPPED)
                free |= {block for block in blocks if block.state == FREE}
                unmapped = {block for block in blocks if block.state == UNMAPPED}
                assert unmapped <= {block for _, block in segment.free_set.unmapped}
                assert segment.page or not unmapped
                ranges.append((segment.address, segment.address + segment.size))
                physical += multiple(mapped, GRANULE)
                reserved += mapped
            assert set(pool.free_blocks()) == free  # the sets hold what is free, and nothing else
            allocated += pool.tally.allocated_now
            waiting += pool.tally.waiting_bytes_now
    assert all(left[1] <= right[0] for left, right in pairwise(sorted(ranges)))
    subject.memory.driver.check()
    counters = subject.counters
    assert subject.memory.driver.free_bytes == CAPACITY - physical >= 0
    assert counters.reserved_bytes == subject.memory.reserved == reserved
    assert counters.reserved_bytes >= counters.active_bytes >= counters.allocated_bytes == allocated >= 0
    assert counters.active_bytes == allocated + waiting
    assert counters.active_bytes >= counters.requested_bytes
    assert 0 <= counters.inactive_split_bytes <= reserved - counters.active_bytes
    figures = subject.statistics()
    for name, value in figures.items():
        quantity, _, kind = name.rpartition(".")
        if kind == "peak":
            assert value >= figures[f"{quantity}.current"], name
        if kind == "freed":
            assert value == figures[f"{quantity}.allocated"] - figures[f"{quantity}.current"] >= 0, name
        if quantity.endswith(".all") and kind == "current":
            pools = (figures[name.replace(".all.", f".{pool}.")] for pool in ("small_pool", "large_pool"))
            assert value == sum(pools), name


def step(subject: CachingAllocator, living: list[Block], name: str, which: int, size: int, stream: int) -> None:
    """One operation."""
    if name == "alloc":
        try:
            block = subject.malloc(size, stream)
        except OutOfMemory:
            return
        assert block.requested == size <= block.size
        living.append(block)
    elif name == "free" and living:
        subject.free(living.pop(which % len(living)))
    elif name == "record_stream" and living:
        subject.record_stream(living[which % len(living)], stream)
    elif name == "empty_cache":
        subject.empty_cache()
    elif name == "events":
        subject.uses.ready = bool(stream)


@examples(200)
@given(STEPS, st.sampled_from(CONFIGS), st.sampled_from(VERSIONS), st.sampled_from([None, 0.7]))
def test_the_books_balance(
    steps: list[tuple[str, int, int, int]], conf: str, version: str, fraction: float | None
) -> None:
    subject = allocator(conf, version, CAPACITY, fraction)
    living: list[Block] = []
    for name, which, size, stream in steps:
        step(subject, living, name, which, size, stream)
        check(subject)
        ends = sorted((block.address, block.address + block.size) for block in living)
        assert all(left[1] <= right[0] for left, right in pairwise(ends))
        if subject.memory.limit is not None and "expandable" not in conf:
            assert subject.memory.reserved <= subject.memory.limit

    for block in living:
        subject.free(block)
        check(subject)
    subject.empty_cache()
    check(subject)
    assert subject.memory.driver.free_bytes == CAPACITY
    assert subject.segments() == ()
    assert not any(value for name, value in subject.statistics().items() if name.endswith("current"))


@examples(40)
@given(STEPS, st.sampled_from(CONFIGS))
def test_without_a_bound_nothing_fails_and_nothing_is_retried(
    steps: list[tuple[str, int, int, int]], conf: str
) -> None:
    subject = allocator(conf)
    living: list[Block] = []
    for name, which, size, stream in steps:
        step(subject, living, name, which, size, stream)

    assert subject.counters.num_alloc_retries == subject.counters.num_ooms == 0


@examples(40)
@given(STEPS, st.sampled_from(CONFIGS), st.sampled_from(VERSIONS))
def test_a_device_that_is_exactly_large_enough_changes_nothing(
    steps: list[tuple[str, int, int, int]], conf: str, version: str
) -> None:
    """A capacity of the peak of an unbounded run: the same blocks, the same peak, no retry."""

    def run(capacity: int | None) -> tuple[list[int], CachingAllocator]:
        subject = allocator(conf, version, capacity)
        living: list[Block] = []
        for name, which, size, stream in steps:
            step(subject, living, name, which, size, stream)
        return [block.size for block in living], subject

    sizes, unbounded = run(None)
    peak = unbounded.counters.reserved.peak
    again, bounded = run(peak)

    assert again == sizes
    assert bounded.counters.reserved.peak == peak
    assert bounded.counters.num_alloc_retries == 0
