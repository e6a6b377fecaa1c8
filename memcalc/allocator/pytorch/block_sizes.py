"""Block sizes of PyTorch's CUDA caching allocator: what it allocates beyond the requested bytes.

Every request is rounded up to 512 bytes. A large block is not split if it exceeds the request by up to 1 MiB; the
remainder counts as allocated with the tensor. Source: torch 2.13 c10/cuda/CUDACachingAllocator.cpp: round_size,
get_allocation_size, get_free_block (best fit) and should_split.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from memcalc.allocator.pytorch.constants import MIN_BLOCK, SMALL_REQUEST, UNSPLIT_REST
from memcalc.allocator.pytorch.rounding import segment_size
from memcalc.workspaces import Script


def rounded(size: int) -> int:
    """Return the size rounded up to a multiple of 512 bytes; 0 for 0."""
    return -(-size // MIN_BLOCK) * MIN_BLOCK


def blocks(script: Script) -> Script:
    """Return the block sizes for a script of requests inside an operator; negative sizes are frees."""
    # The quotient is rounded down, so that of a negative size away from zero.
    return tuple([(-(-size // MIN_BLOCK) if size > 0 else size // MIN_BLOCK) * MIN_BLOCK for size in script])


class AllocationSequence(NamedTuple):
    """Tensors of these sizes, in bytes, allocated in this order, `times` times over (the layers of a model)."""

    sizes: tuple[int, ...]
    times: int = 1


def unsplit_remainders(*lists: Sequence[AllocationSequence]) -> list[int]:
    """Return the bytes of the unsplit remainders of each list when the lists are allocated in turn.

    The device is empty at the start, and nothing is freed in between, as when a model is built.
    """
    return list(_unsplit_tails(tuple(map(tuple, lists))))


@lru_cache(maxsize=512)
def _unsplit_tails(lists: tuple[tuple[AllocationSequence, ...], ...]) -> tuple[int, ...]:
    large = [
        [([request for size in run.sizes if (request := rounded(size)) > SMALL_REQUEST], run.times) for run in runs]
        for runs in lists
    ]
    least = min((request for runs in large for requests, times in runs if times for request in requests), default=0)
    free: list[int] = []  # sizes of free blocks of the large pool, sorted, without blocks too small for any request
    return tuple([sum([_tails_of_run(free, *run, least) for run in runs]) for runs in large])


def _tails_of_run(free: list[int], requests: list[int], times: int, least: int) -> int:
    """Return the unsplit remainders of the same requests repeated `times` times, in bytes.

    When a pass starts with the free blocks of an earlier pass, the passes in between repeat.
    """
    tails = done = 0
    known: dict[tuple[int, ...], tuple[int, int]] = {}  # free blocks -> passes and remainders so far
    while done < times:
        blocks_now = tuple(free)
        if blocks_now in known:
            passes, before = known[blocks_now]
            rounds = (times - done) // (done - passes)
            tails += rounds * (tails - before)
            done += rounds * (done - passes)
            known.clear()  # fewer passes are left than one period has
            continue
        known[blocks_now] = done, tails
        tails += _tails(free, requests, least)
        done += 1
    return tails


def _tails(free: list[int], requests: list[int], least: int) -> int:
    tails = 0
    for request in requests:
        position = bisect_left(free, request)
        rest = (free.pop(position) if position < len(free) else segment_size(request)) - request
        if rest <= UNSPLIT_REST:
            tails += rest
        elif rest >= least:
            insort(free, rest)
    return tails
