"""FSDP2's CPUOffloadPolicy on fake tensors: the device's and the host's memory, against formulas and recordings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import memcalc
from memcalc.errors import InputError
from memcalc.ledger.component import Component
from memcalc.ledger.ledger import Ledger
from memcalc.ledger.result import Result

RECORDINGS = Path(__file__).parents[2] / "benchmarks" / "recordings" / "offload" / "null-h100-80gb-torch-2.13.0.jsonl"
RECORDS = [json.loads(line) for line in RECORDINGS.read_text().splitlines()]

SMALL = ("llama-3.2-1b", "l=2", "b=1", "s=128", "V=4096", "engine=fsdp2", "data_parallel=8", "offload=all")
STEADY = ("zero_grad_2", "forward_2", "loss_2", "backward_2", "optimizer_step_2")


def both(*overrides: str) -> tuple[Result, Result]:
    """The traced and the estimated result."""
    words = (*SMALL, *overrides)
    return memcalc.trace(*words, gpu="h100-80gb", steps=2).result, memcalc.estimate(*words, gpu="h100-80gb")


def host_of(result: Result) -> Ledger:
    assert result.headline.host is not None
    return result.headline.host


def requested(ledger: Ledger, phase: str) -> int:
    """Without what the allocator adds, which depends on the blocks that it has."""
    return ledger.totals[phase] - ledger.components(phase).get(Component.BLOCK_ROUNDING, 0)


@pytest.mark.parametrize(
    "overrides",
    [
        ("recipe=pure", "zero_stage=3"),
        pytest.param(("recipe=amp", "zero_stage=2"), marks=pytest.mark.long),
        pytest.param(("recipe=mixed-16", "zero_stage=3", "offload_pin_memory=false"), marks=pytest.mark.long),
        pytest.param(("recipe=mixed-18", "zero_stage=3", "gradient_clipping=1"), marks=pytest.mark.long),
        pytest.param(("recipe=mixed-20", "zero_stage=3", "gradient_accumulation_steps=2"), marks=pytest.mark.long),
        pytest.param(
            ("recipe=pure", "zero_stage=3", "gradient_accumulation_steps=2", "optimizer=lion"), marks=pytest.mark.long
        ),
        pytest.param(("recipe=amp", "zero_stage=3", "optimizer=momentum", "ema=fp32"), marks=pytest.mark.long),
        pytest.param(("recipe=pure", "zero_stage=3", "data_parallel_replicate=2"), marks=pytest.mark.long),
        pytest.param(("recipe=pure", "zero_stage=3", "optimizer_implementation=foreach"), marks=pytest.mark.long),
        pytest.param(("recipe=pure", "zero_stage=3", "optimizer_implementation=fused"), marks=pytest.mark.long),
    ],
)
def test_the_device_and_the_host_are_the_estimates(overrides: tuple[str, ...]) -> None:
    """The host to the byte in every phase; the device's requests within metadata of FSDP2's copies (2 KiB a layer)."""
    traced, estimated = both(*overrides)

    for phase in STEADY:
        assert host_of(traced).totals[phase] == host_of(estimated).totals[phase], phase
        device = requested(estimated.ledger, phase)
        assert requested(traced.ledger, phase) == pytest.approx(device, rel=2e-4, abs=0), phase


@pytest.mark.long
@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record["case"])
def test_a_rank_holds_what_was_recorded(record: dict[str, object]) -> None:
    """Peaks of the steady step to the byte, and so is pinned memory."""
    preset, *overrides = str(record["case"]).split()
    result = memcalc.trace(preset, *overrides, gpu="h100-80gb", steps=2).result

    phases = record["phases"]
    assert isinstance(phases, dict)
    assert {phase: result.ledger.totals[phase] for phase in STEADY} == {phase: phases[phase] for phase in STEADY}


@pytest.mark.long
def test_a_large_model_costs_the_host_that_traces_it_nothing() -> None:
    """Two layers of 405B on two ranks: 5 billion bf16 weights each. SGD has no states."""
    words = ("llama-3.1-405b", "l=2", "s=16", "recipe=pure", "optimizer=sgd", "engine=fsdp2", "zero_stage=3")
    traced = memcalc.trace(*words, "data_parallel=2", "offload=all", steps=1).result

    weights = host_of(traced).components("zero_grad_1")[Component.WEIGHTS]
    assert weights * 2 >= 2 * traced.parameters > 16 * 2**30
    assert Component.WEIGHTS not in traced.ledger.components("optimizer")


def test_offload_on_the_cpu_is_rejected() -> None:
    with pytest.raises(InputError, match="offload = all has no effect: the step already runs on the CPU"):
        memcalc.trace(*SMALL, "zero_stage=3", semantics="cpu")
