"""Storages that another CUDA stream uses: free at once, or when the host waits for the stream."""

from __future__ import annotations

from memcalc.stream.requests import DelayedRequests, Requests, replay

MIB = 1 << 20
SIZE = 32 * MIB  # a segment of its own
COMPUTE, OTHER = 0, 1


def used_twice(requests: Requests) -> Requests:
    """Allocate two storages on a stream, one after the other, that the compute stream uses."""
    requests.begin("step")
    for _ in range(2):
        requests.drop_used((requests.take(SIZE, OTHER),), COMPUTE)
    return requests


def test_a_block_is_free_at_once_on_a_gpu_that_is_on_time() -> None:
    assert replay(used_twice(Requests())).reserved_bytes == SIZE


def test_a_block_waits_for_a_gpu_that_is_late() -> None:
    assert replay(used_twice(DelayedRequests())).reserved_bytes == 2 * SIZE


def test_waiting_for_all_streams_frees_what_they_used() -> None:
    requests = used_twice(DelayedRequests())
    requests.wait()
    used_twice(requests)

    assert replay(requests).reserved_bytes == 2 * SIZE  # not four


def test_an_event_frees_what_its_stream_used_before_it() -> None:
    requests = DelayedRequests()
    requests.begin("step")
    first = requests.take(SIZE, OTHER)
    requests.drop_used((first,), COMPUTE)
    event = requests.event(COMPUTE)
    requests.drop_used((requests.take(SIZE, OTHER),), COMPUTE)
    requests.drop_used((requests.take(SIZE, OTHER),), 2)

    requests.wait_for(COMPUTE, event)
    requests.take(SIZE, OTHER)  # the first block
    requests.wait_for(COMPUTE, event)  # has happened
    requests.take(SIZE, OTHER)

    assert requests.owners((first,)) == {first: 0}
    assert replay(requests).reserved_bytes == 4 * SIZE
