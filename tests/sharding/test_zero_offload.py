"""What DeepSpeed allocates on the device with optimizer states, or weights too, in host memory: by hand for a small model.

Stage 2's requests are those of recorded ranks: tests/training_programs/test_programs.py, tests/simulation/test_recorded.py.
"""

from __future__ import annotations

import pytest

import memcalc
from memcalc.allocator.pytorch.constants import STREAM_SHIFT
from memcalc.simulation.simulated_run import run_requests, unsupported_reason
from memcalc.spec.spec import Spec
from tests.sharding.small_model import RANKS, VOCAB, WIDTH
from tests.sharding.test_deepspeed import BUCKET, ELEMENTS, LARGE, LAYERS, MATRICES, asked, on_streams, small

TABLE = VOCAB * WIDTH
REDUCE = 2  # the CUDA stream of reductions
SHARE = ELEMENTS // RANKS


def offloaded(stage: int, *words: str, offload: str = "optimizer") -> Spec:
    return small(f"zero_stage={stage}", f"offload={offload}", *words)


def pieces() -> list[int]:
    """Elements of each matrix in the first rank's quarter: the embedding, and most of the first layer, in the order of
    reduction, which is that of the bucket: from the last parameter to the first."""
    found, left = [], SHARE
    for elements in (TABLE, WIDTH, *MATRICES[:2], WIDTH, *MATRICES[2:]):
        found.append(min(elements, left))
        left -= found[-1]
        if not left:
            break
    return [each for each in reversed(found) if 2 * each > LARGE]


def test_stage_2_has_a_buffer_for_gradients_in_place_of_masters() -> None:
    """The flat weights; the share, cloned, on its way to the host; a buffer as large as the largest parameter."""
    assert asked(offloaded(2), "optimizer") == [(0, 2 * ELEMENTS), (0, 2 * SHARE), (0, 2 * TABLE)]


def test_stage_2_copies_each_reduced_gradient_to_the_host() -> None:
    """In double precision for its norm, then in fp32; none stays, and the step has nothing to do on the device."""
    found = asked(offloaded(2), "backward_1")
    after = found[found.index((0, 2 * ELEMENTS)) + 1 :]

    assert found.count((0, 2 * BUCKET)) == 1
    assert after == [(0, size * each) for each in pieces() for size in (8, 4)]
    assert asked(offloaded(2), "optimizer_step_1") == []


def test_micro_batches_before_the_last_add_to_the_host_through_a_buffer_that_exists() -> None:
    stretches = run_requests(offloaded(2, "gradient_accumulation_steps=2"), rank=0).stretches
    backward = [each.script for each in stretches if each.phase == "backward_1"]
    largest = 8 * TABLE

    assert [largest in script for script in backward] == [False, True]


@pytest.mark.parametrize(
    ("release", "copies"),
    [("0.19.8", []), ("0.19.5", [4 * TABLE, TABLE, 4 * TABLE, TABLE, TABLE, 4 * TABLE])],
)
def test_the_check_for_overflow(release: str, copies: list[int]) -> None:
    """Before 0.19.6 in fp32, elementwise: is it NaN, its absolute value, is it infinite, either, as a number."""
    found = [size for _, size in asked(offloaded(2, f"versions.deepspeed={release}"), "backward_1")]
    begin = len(found) - 1 - found[::-1].index(8 * TABLE)  # the embedding's gradient is reduced last

    assert found[begin + 1 :] == [*copies, 4 * TABLE]


@pytest.mark.parametrize(("release", "clones"), [("0.19.8", True), ("0.19.7", False)])
def test_a_gradient_larger_than_the_bucket_is_cloned(release: str, clones: bool) -> None:
    """The head's, as soon as it is there; its bucket is reduced before, if it has anything."""
    words = (f"versions.deepspeed={release}", f"zero_optimization.reduce_bucket_size={TABLE - 1}")
    found = asked(offloaded(2, *words), "backward_1")
    bucket = found.index((0, 2 * (TABLE - 1)))

    assert (found[bucket + 1] == (0, 2 * TABLE)) == clones


@pytest.mark.parametrize("offload", ["optimizer", "all"])
def test_stage_3_has_the_bucket_and_the_shards_that_stay(offload: str) -> None:
    """Then each parameter is gathered for a moment, with the rank's shard beside it if weights are on the host."""
    found = asked(offloaded(3, offload=offload), "optimizer")
    shards = [(0, 2 * SHARE)] if offload == "optimizer" else []
    table = [(0, 2 * TABLE), *([(0, 2 * TABLE // RANKS)] if offload == "all" else [])]

    assert found[: len(shards) + 1 + len(table)] == [*shards, (0, 2 * BUCKET), *table]


def test_stage_3_copies_shards_of_gradients_back_and_forth() -> None:
    """On the stream of reductions, for each matrix: the sum in 16 bits, in double precision, in fp32."""
    found = [size for stream, size in on_streams(offloaded(3), "backward_1") if stream == REDUCE]
    flattened = found.index(2 * ELEMENTS)
    matrices = [TABLE, *MATRICES * LAYERS, TABLE]  # in registration order: of the embedding, the layers, the head
    expected = [size * each // RANKS for each in matrices for size in (2, 8, 4) if size * each // RANKS > LARGE]

    assert found[flattened + 1 :] == expected


def test_weights_on_the_host_are_copied_to_be_gathered() -> None:
    """The first parameter of forward is the embedding: its whole and the rank's shard of it, on the gathering stream."""
    with_shards, without = (on_streams(offloaded(3, offload=where), "forward_1") for where in ("all", "optimizer"))

    assert with_shards[:2] == [(1, 2 * TABLE), (1, 2 * TABLE // RANKS)]
    assert without[0] == (1, 2 * TABLE)
    assert (1, 2 * TABLE // RANKS) not in without


def test_weights_alone_on_the_host_are_not_replayed() -> None:
    reason = unsupported_reason(offloaded(3, offload="parameters"))

    assert "weights alone in host memory under DeepSpeed" in reason


def gathered_most(*words: str) -> int:
    """The most bytes on the gathering stream during backward; what it holds at its begin is counted."""
    spec = small("zero_stage=3", "finetune=lora", "implementation=huggingface", *words)
    requests = run_requests(spec, rank=0)
    sizes: list[int] = []
    live = most = 0
    for interval in requests.stretches:
        for change in interval.script:
            if change >= 0:
                sizes.append(change % (1 << STREAM_SHIFT) if change >> STREAM_SHIFT == 1 else 0)
                live += sizes[-1]
            else:
                live -= sizes[~change]
            most = max(most, live) if interval.phase == "backward_1" else most
    return most


def test_frozen_weights_of_a_recomputation_stay_until_its_module_has_ended() -> None:
    """Since 0.19.3 all frozen weights of the layer stay, before each one is freed when its module has run again."""
    after, before = (gathered_most("recompute=full", f"versions.deepspeed={each}") for each in ("0.19.3", "0.19.2"))

    assert 0 < after - before <= 2 * sum(MATRICES)


def test_estimates_say_what_the_host_holds() -> None:
    result = memcalc.estimate(offloaded(2))
    assert result.headline.host is not None
    assert result.headline.host.peak_bytes > 16 * SHARE
