"""The seed case of fragmentation, event by event: enough is free in sum, and a request fails all the same."""

from __future__ import annotations

from memcalc.allocator import replay
from memcalc.events import Event, EventType
from tests.allocator.running import MIB

DEVICE = 1300 * MIB


def stream(*words: str) -> list[Event]:
    """ "+P600" allocates 600 MiB under the name P, "-P" frees them."""
    events = []
    for word in words:
        sign, name, size = word[0], ord(word[1]), int(word[2:] or 0) * MIB
        events.append(Event(EventType.ALLOC, name, size) if sign == "+" else Event(EventType.FREE, name))
    return events


# P is cached; a and c share its 600 MiB; b takes the front of Q's; c goes: 500 MiB are free in each of two segments.
APART = stream("+P600", "-P", "+a100", "+c500", "+Q600", "-Q", "+b100", "-c", "+R800")
# The same sizes out of one segment of 1200 MiB: the free parts are neighbors, and merge.
TOGETHER = stream("+P1200", "-P", "+a100", "+c500", "+d500", "+b100", "-c", "-d", "+R800")


def test_two_free_blocks_that_are_not_neighbors_cannot_serve_their_sum() -> None:
    result = replay(APART, capacity=DEVICE)

    assert result.failure is not None
    assert result.failure.event == len(APART) - 1
    assert (result.end.allocated, result.end.reserved) == (200 * MIB, 1200 * MIB)
    assert result.end.inactive_split == 2 * 500 * MIB  # more than the 800 that are requested
    free = [block.size for view in result.segments for block in view.blocks if block.state == "inactive"]
    assert free == [500 * MIB, 500 * MIB]
    assert "200.00 MiB is allocated by PyTorch, and 1000.00 MiB is reserved by PyTorch but unallocated" in (
        result.failure.message
    )


def test_neighbors_merge_and_serve_it() -> None:
    result = replay(TOGETHER, capacity=DEVICE)

    assert result.fits
    assert (result.end.allocated, result.end.reserved) == (1000 * MIB, 1200 * MIB)
    assert result.device_allocations == 1


def test_unsplittable_blocks_can_be_freed_to_the_device() -> None:
    """P and Q are one oversize block that nothing small may break up; for R it and c's go back to the device."""
    result = replay(APART, "max_split_size_mb:200", capacity=DEVICE)

    assert result.fits
    assert result.end.allocated == 100 * MIB + 100 * MIB + 800 * MIB
    assert result.device_frees == 2  # 600 and 500 MiB
    assert result.end.inactive_split == 0


def test_expandable_segments_map_what_is_missing() -> None:
    result = replay(APART, "expandable_segments:True", capacity=DEVICE)

    assert result.fits
    assert result.end.allocated == 1000 * MIB


GIB = 2**30
FRAGMENTS = 7


def published() -> list[Event]:
    """A run that dies with 17.62 GiB reserved and 11.39 GiB allocated, as a published message has it.

    7 segments of 0.99 GiB of which 0.1 are in use and 0.89 are not, and 10.69 GiB that are whole:
    7 x 0.99 + 10.69 = 17.62; 7 x 0.1 + 10.69 = 11.39.
    """
    kept, rest, whole = 102 * MIB, 912 * MIB, 10946 * MIB  # 0.1, 0.89, 10.69 GiB
    events = [Event(EventType.ALLOC, 1000, whole)]
    for number in range(FRAGMENTS):
        big, small, filler = 3 * number, 3 * number + 1, 3 * number + 2
        events += [
            Event(EventType.ALLOC, big, kept + rest),
            Event(EventType.FREE, big),
            Event(EventType.ALLOC, small, kept),
            Event(EventType.ALLOC, filler, rest),
        ]
    events += [Event(EventType.FREE, 3 * number + 2) for number in range(FRAGMENTS)]
    return [*events, Event(EventType.ALLOC, 2000, 2 * GIB)]


def test_the_published_example_and_its_lever() -> None:
    """6.23 GiB are cached and of no use; max_split_size_mb or expandable segments make the run fit."""
    events, capacity = published(), 19 * GIB
    result = replay(events, capacity=capacity)

    assert result.failure is not None
    assert f"{result.end.reserved / GIB:.2f} {result.end.allocated / GIB:.2f}" == "17.62 11.39"
    assert f"{result.end.inactive_split / GIB:.2f}" == "6.23"
    assert replay(events, "max_split_size_mb:512", capacity=capacity).fits
    assert replay(events, "expandable_segments:True", capacity=capacity).fits
