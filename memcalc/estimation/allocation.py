"""What PyTorch's caching allocator hands out beyond the bytes asked for.

Every request is rounded up to 512 bytes; and of a large block a rest of up to 1 MiB is not split off, so it counts as
allocated with the tensor. Source: torch 2.13 c10/cuda/CUDACachingAllocator.cpp: round_size, get_allocation_size,
get_free_block (best fit) and should_split.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from memcalc.workspaces import Script

BLOCK = 512  # kMinBlockSize
MIB = 2**20
SMALL_REQUEST = MIB  # kSmallSize: up to here tensors share 2 MiB segments, in which every rest is split off
LARGE_REQUEST = 10 * MIB  # kMinLargeAlloc: from here on a segment is made to measure
LARGE_SEGMENT = 20 * MIB  # kLargeBuffer: the segment of requests between the two
SEGMENT_STEP = 2 * MIB  # kRoundLarge: segments made to measure are multiples of it
UNSPLIT_TAIL = MIB  # a rest must be larger to be split off


def rounded(size: int) -> int:
    """A multiple of 512 bytes; nothing for nothing."""
    return -(-size // BLOCK) * BLOCK


def blocks(script: Script) -> Script:
    """Sizes of the blocks that the allocator allocates and frees for the buffers inside an operator."""
    return tuple(rounded(size) if size > 0 else -rounded(-size) for size in script)


class Run(NamedTuple):
    """Tensors of these bytes, made in this order so many times over, as the layers of a model are."""

    sizes: tuple[int, ...]
    times: int = 1


def unsplit_tails(*lists: Sequence[Run]) -> list[int]:
    """Bytes of the rests that stay with their tensors when lists of tensors of these sizes are allocated in turn.

    One figure a list. Starts from an empty device and frees nothing in between, as when a model is built.
    """
    return list(_unsplit_tails(tuple(map(tuple, lists))))


@lru_cache(maxsize=512)
def _unsplit_tails(lists: tuple[tuple[Run, ...], ...]) -> tuple[int, ...]:
    large = [
        [([request for size in run.sizes if (request := rounded(size)) > SMALL_REQUEST], run.times) for run in runs]
        for runs in lists
    ]
    least = min((request for runs in large for requests, times in runs if times for request in requests), default=0)
    free: list[int] = []  # sizes of free blocks of the large pool, sorted; those too small for any request left out
    return tuple([sum([_tails_of_run(free, *run, least) for run in runs]) for runs in large])


def _tails_of_run(free: list[int], requests: list[int], times: int, least: int) -> int:
    """Of the same requests again and again. Once a pass begins with the free blocks of an earlier one, all repeats."""
    tails = done = 0
    known: dict[tuple[int, ...], tuple[int, int]] = {}  # what was free -> passes and tails until then
    while done < times:
        blocks_now = tuple(free)
        if blocks_now in known:
            passes, before = known[blocks_now]
            rounds = (times - done) // (done - passes)
            tails += rounds * (tails - before)
            done += rounds * (done - passes)
            known.clear()  # fewer are left than a round has
            continue
        known[blocks_now] = done, tails
        tails += _tails(free, requests, least)
        done += 1
    return tails


def _tails(free: list[int], requests: list[int], least: int) -> int:
    tails = 0
    for request in requests:
        position = bisect_left(free, request)
        rest = (free.pop(position) if position < len(free) else _segment(request)) - request
        if rest <= UNSPLIT_TAIL:
            tails += rest
        elif rest >= least:
            insort(free, rest)
    return tails


def _segment(request: int) -> int:
    """The segment that is made for a large request."""
    return LARGE_SEGMENT if request < LARGE_REQUEST else -(-request // SEGMENT_STEP) * SEGMENT_STEP
