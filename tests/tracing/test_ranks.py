"""FSDP2 on simulated ranks, against runs of the same step under PyTorch's CUDA build (null device)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import memcalc
from memcalc.errors import InputError
from memcalc.ledger.component import Component
from tests.thinning import quick_every

RECORDINGS = Path(__file__).parents[2] / "benchmarks" / "recordings" / "sharded" / "null-h100-80gb-torch-2.13.0.jsonl"
RECORDS = {record["case"]: record for record in map(json.loads, RECORDINGS.read_text().splitlines())}
FSDP2 = [case for case in RECORDS if "engine=fsdp2" in case and "llama" in case]

SMALL = ("llama-3.2-1b", "l=2", "b=1", "s=256", "V=4096", "recipe=pure", "engine=fsdp2", "zero_stage=3")
STATES = (Component.WEIGHTS, Component.GRADIENTS, Component.OPTIMIZER_STATE)


def spec_of(case: str) -> Any:
    preset, *overrides = case.split()
    return memcalc.load(preset, *overrides, gpu="h100-80gb")


@pytest.mark.long
@pytest.mark.parametrize("case", FSDP2[:2])
def test_a_rank_of_fsdp2_holds_what_was_recorded(case: str) -> None:
    """Peaks of the steady step to the byte; of the first one, to a part in a thousand (where segments begin)."""
    recorded = RECORDS[case]["phases"]
    traced = memcalc.trace(spec_of(case), steps=2).result.ledger.totals

    for phase in ("zero_grad_2", "forward_2", "loss_2", "backward_2", "optimizer_step_2"):
        assert traced[phase] == recorded[phase], phase
    for phase in traced:
        assert traced[phase] == pytest.approx(recorded[phase], rel=5e-3), phase


@pytest.mark.parametrize("ranks", quick_every(4, [2, 8, 64, 1024], first=3))
def test_shards_are_the_estimates_and_sum_to_the_whole(ranks: int) -> None:
    """Each state of a rank, times the ranks, is that of one GPU and what evens the rows out."""
    traced = memcalc.trace(*SMALL, f"data_parallel={ranks}", gpu="h100-80gb", steps=2).result.ledger
    estimated = memcalc.estimate(memcalc.load(*SMALL, f"data_parallel={ranks}", gpu="h100-80gb")).ledger
    whole = memcalc.estimate(memcalc.load(*SMALL[:-2], gpu="h100-80gb")).ledger

    held, expected = traced.components("optimizer_step_2"), estimated.components("optimizer_step_2")
    for component in STATES:
        assert held[component] == expected[component]
        assert held[component] * ranks >= whole.components("optimizer_step_2")[component]
    assert Component.COMMUNICATION_BUFFERS in traced.components("forward_2")


def test_fsdp1_is_refused_on_fake_tensors() -> None:
    """_flat_param.py resizes storages."""
    with pytest.raises(InputError, match="resizes the memory of tensors"):
        memcalc.trace(*SMALL[:-2], "engine=fsdp1", "zero_stage=3", "data_parallel=8")


def test_replicas_are_refused_on_fake_tensors() -> None:
    """DDP's reducer is compiled code that reads memory."""
    with pytest.raises(InputError, match="Trace it with --device null"):
        memcalc.trace("llama-3.2-1b", "data_parallel=8")


@pytest.mark.parametrize(
    "words", [("zero_stage=1",), ("zero_stage=2", "offload=optimizer"), ("zero_stage=3", "offload=all")]
)
def test_the_step_does_not_leave_out_deepspeed_on_one_rank(words: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match="engine = deepspeed, but the step runs without DeepSpeed"):
        memcalc.trace("gpt2", "num_layers=2", "s=64", "recipe=mixed-16", "engine=deepspeed", *words)


def test_what_the_step_cannot_spread_is_refused() -> None:
    """Stages of a pipeline have no engine here."""
    with pytest.raises(InputError, match="pipeline_parallel = 2, but the step runs on one device"):
        memcalc.trace("llama-3.2-1b", "pipeline_parallel=2")


@pytest.mark.parametrize(
    ("optimizer", "implementation"),
    quick_every(3, [("adafactor", "foreach"), ("adafactor", "for-loop"), ("rprop", "foreach")], unpack=True),
)
def test_an_optimizer_that_cannot_update_parts_is_refused(optimizer: str, implementation: str) -> None:
    """By PyTorch's DTensor, in the middle of the step: one message with its reason, not its traceback."""
    with pytest.raises(InputError) as refused:
        memcalc.trace(
            "gpt2",
            "l=1",
            "d=64",
            "h=4",
            "V=96",
            "s=32",
            "engine=fsdp2",
            "zero_stage=3",
            "data_parallel=4",
            f"optimizer={optimizer}",
            f"optimizer_implementation={implementation}",
            steps=1,
        )

    message = str(refused.value)
    assert "cannot update parameters that are split over ranks with it: " in message
    assert f"optimizer = {optimizer} ({implementation}): PyTorch 2." in message
    assert len(message) < 400
    assert message.endswith("Set another optimizer, such as adamw, or engine: ddp, which splits none.")


def test_a_loss_that_reads_the_head_itself_is_refused() -> None:
    """memcalc rejects the run before PyTorch fails on mixed tensors."""
    with pytest.raises(InputError, match="loss = chunked reads the LM head while FSDP2 has it sharded"):
        memcalc.trace(*SMALL, "data_parallel=2", "loss=chunked")
