"""DeepSpeed with gradients of 16-bit weights that are summed in fp32: recipe mixed-20, data_types.grad_accum_dtype."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import memcalc
from memcalc.errors import InputError
from memcalc.importers.loading import load
from memcalc.ledger.component import Component
from memcalc.sharding.zero12 import FlatGroup, WaitingGradient, bucket_slices
from memcalc.simulation.simulated_run import simulate, unsupported_reason
from memcalc.spec.spec import Spec
from memcalc.verdict.judge import size
from tests.sharding.small_model import RANKS, VOCAB, WIDTH, sizes
from tests.thinning import quick_every
from tools.recorded_errors import recorded_spec

FOLDER = Path(__file__).parents[2] / "benchmarks" / "recordings" / "reserved"
RECORDS = [
    json.loads(line) for path in sorted(FOLDER.glob("*zero-sums*.jsonl")) for line in path.read_text().splitlines()
]
LAYERS = 2
# q, k, v, o, gate, up and down, two norms; embedding, final norm and LM head.
PARAMETERS = LAYERS * (4 * WIDTH**2 + 3 * 4 * WIDTH**2 + 2 * WIDTH) + 2 * VOCAB * WIDTH + WIDTH


def small(*words: str) -> Spec:
    return memcalc.load("llama-3.2-1b", *sizes(LAYERS), "recipe=mixed-20", "engine=deepspeed", *words)


def gradients(spec: Spec, phase: str) -> int:
    return memcalc.estimate(spec).ledger.components(phase).get(Component.GRADIENTS, 0)


@pytest.mark.parametrize("record", quick_every(2, RECORDS, first=1), ids=lambda record: record["case"])
def test_a_recorded_rank_reserves_as_replayed(record: dict[str, Any]) -> None:
    """DeepSpeed 0.19.8 on the null CUDA device, the first rank of several: byte-exact."""
    spec = recorded_spec(record)

    assert simulate(spec, rank=0).reserved_bytes == max(record["reserved"].values())


@pytest.mark.parametrize("record", quick_every(2, RECORDS), ids=lambda record: record["case"])
def test_the_formulas_count_what_a_rank_allocates(record: dict[str, Any]) -> None:
    """Of the first rank within 0.01 %, or more: another rank has its sums earlier in backward."""
    counted = size(recorded_spec(record)).ledger.peak_bytes

    assert counted >= 0.9999 * max(record["phases"].values())


def test_stage_1_runs_the_bf16_optimizer() -> None:
    """2 bytes of gradients and 4 of sums for each parameter; the sums stay between steps."""
    spec = small("zero_stage=1")

    assert gradients(spec, "optimizer_step_2") == (2 + 4) * PARAMETERS
    assert gradients(spec, "zero_grad_2") == 4 * PARAMETERS


def test_stage_2_sums_the_partition() -> None:
    """4 bytes for each parameter of a quarter, from backward to the step, which reads them: no cast copy."""
    spec = small("zero_stage=2")

    assert gradients(spec, "optimizer_step_2") == 4 * PARAMETERS // RANKS
    assert gradients(spec, "zero_grad_2") == 0


def test_stage_3_sums_shards_and_copies_them() -> None:
    """A buffer of 4 bytes for each parameter of a quarter that always exists, and in the step a flat copy of it."""
    spec = small("zero_stage=3")

    assert gradients(spec, "optimizer_step_2") == 2 * 4 * PARAMETERS // RANKS
    assert gradients(spec, "zero_grad_2") == 4 * PARAMETERS // RANKS


def test_only_slices_of_other_ranks_are_merged() -> None:
    """Two gradients of rank 0, which is this one, and two of rank 1."""
    groups = [FlatGroup([0, 5, 8, 14, 16], 0, 8, range(8))]
    sizes = {0: 5, 5: 3, 8: 6, 14: 2}
    waiting = [WaitingGradient(0, begin, elements, None) for begin, elements in sizes.items()]

    def found(*, own_apart: bool) -> list[tuple[int, int, bool]]:
        slices = bucket_slices(waiting, groups, own_apart=own_apart)
        return [(each.rank, each.elements, each.is_own) for each in slices]

    assert found(own_apart=True) == [(0, 5, True), (0, 3, True), (1, 8, False)]
    assert found(own_apart=False) == [(0, 8, False), (1, 8, False)]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sums_in_bf16_are_rejected(stage: int) -> None:
    """Outside of the pipeline engine DeepSpeed then runs another optimizer: recipe mixed-16."""
    with pytest.raises(InputError, match="recipe mixed-20 sums gradients in fp32, but gradient_dtype = bf16"):
        small(f"zero_stage={stage}", "gradient_dtype=bf16")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("zero_stage=2", "versions.deepspeed=0.19.7"), "ZeRO stage 2 of DeepSpeed before 0.19.8 and fp32 sums"),
        (("zero_stage=1", "dtype=fp16"), "DeepSpeed and recipe mixed-20 in fp16"),
        (("zero_stage=0",), "DeepSpeed and recipe mixed-20 in bf16"),
    ],
)
def test_what_is_not_replayed_says_why(words: tuple[str, ...], reason: str) -> None:
    assert unsupported_reason(small(*words)).startswith(f"the order of requests is not known with {reason}")


def test_a_note_names_deepspeeds_own_recipe() -> None:
    """Unless the run says where its gradients are summed."""

    def noted(*words: str) -> bool:
        return any("Its default is --set recipe=mixed-16" in note for note in memcalc.estimate(small(*words)).notes)

    assert noted("zero_stage=2")
    assert any("only with ZeRO" in note for note in memcalc.estimate(small("zero_stage=0")).notes)
    assert not noted("zero_stage=2", "gradient_dtype=fp32")
    assert not noted("zero_stage=2", "recipe=mixed-16")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_deepspeed_file_says_where_gradients_are_summed(stage: int, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    text = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
    path.write_text(json.dumps(text | {"data_types": {"grad_accum_dtype": "fp32"}}))
    spec = load(path, ["preset=llama-3.2-1b", "data_parallel=8"])

    assert (spec.training.recipe, spec.parallelism.zero_stage) == ("mixed-20", stage)
    assert not [limit.feature for limit in spec.origin.limits if limit.holds_memory]
