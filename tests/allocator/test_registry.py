"""What holds for every allocator over random streams of events, and how they are named and made."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.allocator import replay
from memcalc.allocator.base import BlockAllocator
from memcalc.allocator.blocks import Block
from memcalc.allocator.driver import GRANULE
from memcalc.allocator.registry import POLICIES, AllocatorDevice, make
from memcalc.allocator.views import SegmentView
from memcalc.errors import InputError, OutOfMemory
from memcalc.events import Event, EventType
from tests.allocator.running import MIB
from tests.allocator.streams import event_streams
from tests.properties.specs import examples

CAPACITY = 2000 * MIB
CASES = [
    ("pytorch", ""),
    ("pytorch", "expandable_segments:True"),
    ("pytorch", "max_split_size_mb:32"),
    ("paddle-auto-growth", ""),
    ("paddle-auto-growth", "auto_growth_chunk_size_in_mb=16,free_idle_chunk=true"),
    ("paddle-auto-growth", "small_pool_size_in_mb=1,small_pool_auto_growth_chunk_size_in_mb=2"),
    ("paddle-naive-best-fit", "initial_gpu_memory_in_mb=64,reallocate_gpu_memory_in_mb=32"),
    ("paddle-naive-best-fit", ""),
    ("tensorflow", "allow_growth=true"),
    ("tensorflow", ""),
    ("ideal", ""),
]
ALIGNMENT = {"pytorch": 512}  # of blocks; all others' is 256


def allocator(policy: str, config: str, capacity: int | None = CAPACITY) -> BlockAllocator:
    return make(policy, config, None, AllocatorDevice(capacity=capacity)).allocator


def check(subject: BlockAllocator, living: list[Block]) -> None:
    """No overlap, nothing lost, neighbors merged, the counters those of the blocks."""
    views = subject.segments()
    counters = subject.counters
    assert sum(view.total_size for view in views) == counters.reserved_bytes == subject.device.reserved
    assert sum(view.allocated_size for view in views) == counters.allocated_bytes
    assert sum(view.active_size for view in views) == counters.active_bytes
    assert sum(view.requested_size for view in views) == counters.requested_bytes
    assert sum(block.size for block in living) == counters.allocated_bytes
    assert len(living) == sum(b.state == "active_allocated" for view in views for b in view.blocks)
    assert all(left.address + left.total_size <= right.address for left, right in pairwise(views))
    for view in views:
        check_segment(view)
    used = subject.device.driver.capacity - subject.device.driver.free_bytes
    assert used >= counters.reserved_bytes // GRANULE * GRANULE if views else used == 0
    inactive = sum(b.size for view in views for b in view.blocks if b.state == "inactive" and len(view.blocks) > 1)
    if not any(view.is_expandable for view in views) and type(subject).__name__ != "IdealAllocator":
        assert counters.inactive_split_bytes == inactive
    assert all(value >= 0 or name == "max_split_size" for name, value in subject.statistics().items())
    assert counters.peaks.allocated >= counters.allocated_bytes
    assert counters.reserved.peak >= counters.reserved_bytes


def check_segment(view: SegmentView) -> None:
    assert view.blocks[0].address == view.address
    assert sum(block.size for block in view.blocks) == view.total_size
    for left, right in pairwise(view.blocks):
        assert left.address + left.size == right.address
        assert not left.state == right.state == "inactive"


@pytest.mark.parametrize(("policy", "config"), CASES)
@examples(40)
@given(event_streams(streams=True))
def test_the_books_balance(policy: str, config: str, events: list[Event]) -> None:
    subject = allocator(policy, config)
    blocks: dict[int, Block] = {}
    for event in events:
        if event.kind is EventType.ALLOC:
            try:
                blocks[event.storage] = subject.malloc(event.bytes, event.stream)
            except OutOfMemory:
                break
            assert blocks[event.storage].size >= event.bytes
        elif event.kind is EventType.FREE:
            subject.free(blocks.pop(event.storage))
        elif event.kind is EventType.RECORD_STREAM:
            subject.record_stream(blocks[event.storage], event.stream)
        elif event.kind is EventType.EMPTY_CACHE:
            subject.empty_cache()
        check(subject, list(blocks.values()))

    for storage in list(blocks):
        subject.free(blocks.pop(storage))
    subject.empty_cache()
    check(subject, [])
    assert subject.counters.active_bytes == 0
    if policy != "tensorflow":
        assert subject.device.reserved == 0
        assert subject.device.driver.free_bytes == CAPACITY


@pytest.mark.parametrize(("policy", "config"), [case for case in CASES if case[0] != "ideal"])
@examples(40)
@given(event_streams(streams=True))
def test_the_ideal_is_a_lower_bound(policy: str, config: str, events: list[Event]) -> None:
    """Of the device's memory, with the alignment of the policy; and with that of 512 for PyTorch's reserved bytes."""
    result = replay(events, config, capacity=20 * CAPACITY, policy=policy)
    ideal = replay(events, f"alignment={ALIGNMENT.get(policy, 256)}", capacity=20 * CAPACITY, policy="ideal")

    assert result.fits
    assert ideal.peak_device <= result.peak_device
    assert ideal.peak_allocated <= result.peak_allocated
    if policy == "pytorch":
        assert ideal.peak_reserved <= result.peak_reserved


@pytest.mark.parametrize(("policy", "config"), CASES)
@examples(20)
@given(event_streams(), st.integers(100, 1500))
def test_a_run_never_takes_more_than_the_device_has(
    policy: str, config: str, events: list[Event], capacity: int
) -> None:
    result = replay(events, config, capacity=capacity * MIB, policy=policy)

    assert result.peak_device <= capacity * MIB
    if result.failure:
        assert events[result.failure.event].kind is EventType.ALLOC
        assert result.failure.message


def test_the_widest_moment_is_that_of_reserved_memory() -> None:
    events = [
        Event(EventType.ALLOC, 0, 30 * MIB), Event(EventType.FREE, 0), Event(EventType.ALLOC, 1, 40 * MIB), Event(EventType.FREE, 1),
        Event(EventType.ALLOC, 2, 30 * MIB), Event(EventType.ALLOC, 3, 10 * MIB + 512),
    ]  # fmt: skip
    result = replay(events)

    assert (result.peak_allocated_sample.event, result.peak_reserved_sample.event, result.peak_reserved) == (
        5,
        2,
        70 * MIB,
    )


@pytest.mark.parametrize(
    ("policy", "config", "version", "words"),
    [
        ("jemalloc", "", None, "'jemalloc' is not an allocator. Choose pytorch, paddle-auto-growth"),
        ("tensorflow", "", None, "no GPU is given. Name one with --gpu"),
        ("paddle-naive-best-fit", "", None, "no GPU is given"),
        (
            "tensorflow",
            "allow_growth=true",
            "2.13",
            "version = 2.13 has no effect: the rules of tensorflow are the same",
        ),
        ("ideal", "alignment=3", None, "alignment = 3 is invalid. The value must be a power of two"),
        ("pytorch", "max_split:3", None, "no allocator option 'max_split'"),
    ],
)
def test_what_is_refused(policy: str, config: str, version: str | None, words: str) -> None:
    with pytest.raises(InputError, match=words):
        make(policy, config, version, AllocatorDevice())


def test_a_memory_fraction_is_pytorch_s() -> None:
    with pytest.raises(InputError, match="Set gpu_memory_limit_mb for Paddle"):
        make("paddle-auto-growth", "", None, AllocatorDevice(), 0.5)


def test_every_policy_has_a_case() -> None:
    assert {policy for policy, _ in CASES} == set(POLICIES)
