"""Ring attention's buffers, beside what PyTorch allocated on the null device (benchmarks/ring_attention.py)."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from memcalc.layout.sequence_sharding import rank_with_most
from memcalc.programs.operator_workspaces import ring_output_by_token
from memcalc.workspaces.attention import Heads
from memcalc.workspaces.ring_attention import Ring, Rotation, backward, forward

RECORDING = Path(__file__).parents[2] / "benchmarks" / "recordings" / "ring-attention" / "torch-2.13.0.jsonl"
RECORDS = [json.loads(line) for line in RECORDING.read_text().splitlines()]
ROTATIONS: dict[str, Rotation] = {"allgather": "all-gather", "alltoall": "ring"}
H100_MULTIPROCESSORS = 132


def top(script: list[int] | tuple[int, ...]) -> int:
    """The most bytes alive at once."""
    return max(accumulate(script))


def sizes_of(record: dict[str, Any]) -> tuple[Heads, Ring]:
    """The shape of a record and its rank."""
    b, h, kv, s, d = (record[name] for name in ("b", "h", "kv", "s", "d"))
    return Heads(b, h, kv, s, s, d, 2), Ring(record["ranks"], ROTATIONS[record["method"]], record["rank"])


@pytest.mark.parametrize("record", RECORDS, ids=lambda each: f"{each['seed']}-{each['number']}")
def test_the_buffers_of_one_rank_are_those_of_pytorch_in_order(record: dict[str, Any]) -> None:
    sizes, ring = sizes_of(record)
    mine = forward(sizes, ring, H100_MULTIPROCESSORS)
    theirs = record["forward"]
    output = 2 * sizes.b * sizes.h * sizes.s * sizes.d
    # Afterwards the output, its log-sum-exps, a random state and an unused mask stay: 24 bytes.
    assert sum(theirs) == output + 4 * sizes.b * sizes.h * sizes.s + 24
    # The same sizes are allocated in the same order, then the output.
    assert [size for size in theirs if size > 0] == [*(size for size in mine if size > 0), output]
    assert top(mine) == top(theirs)

    mine, theirs = backward(sizes, ring), record["backward"]
    made = [size for size in mine if size > 0]
    assert [size for size in theirs if size > 0][: len(made)] == made
    assert top(mine) == top(theirs)
    # The gradients of q, and of k and v together, come last.
    keys = 2 * sizes.b * sizes.kv * sizes.s * sizes.d
    assert [size for size in theirs if size > 0][len(made) :] == [output, 2 * keys]


@pytest.mark.parametrize("rotation", ["ring", "all-gather"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_counted_rank_has_the_largest_buffers_of_those_that_copy_their_output(
    ranks: int, rotation: Rotation
) -> None:
    sizes = Heads(2, 16, 4, 1024, 1024, 128, 2)
    counted = Ring(ranks, rotation, rank_with_most(ranks))
    for rank in range(ranks - 1):
        ring = counted._replace(rank=rank)
        assert top(forward(sizes, ring, H100_MULTIPROCESSORS)) <= top(forward(sizes, counted, H100_MULTIPROCESSORS))
        assert top(backward(sizes, ring)) <= top(backward(sizes, counted))


def test_the_last_rank_needs_no_copy_of_its_output_by_token() -> None:
    """A program of transformers reserved 4,336 MiB on its last rank, 3,960 MiB on the one before."""
    values = {"b": 2, "s/c": 256, "h": 32, "d_h": 64, "c": 4}
    copies = [ring_output_by_token(values | {"c_i": rank}, "h", "d_h", "s/c", item_bytes=2) for rank in range(4)]
    assert copies == [2 * 256 * 32 * 64 * 2] * 3 + [0]
