"""Stages of pipelines: the schedules' orders by hand, and replays beside recorded ranks."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import memcalc
from memcalc.estimation.estimate import estimate
from memcalc.layout.local_parameters import stage_parameters
from memcalc.layout.stages import stages_of
from memcalc.ledger.row_drafts import BIT
from memcalc.sharding import schedules
from memcalc.sharding.schedules import actions_of
from memcalc.simulation.simulated_run import run_requests, simulate, unsupported_reason
from memcalc.spec.loading import load
from memcalc.spec.spec import Spec
from memcalc.states.pipelining import received as of_engine
from memcalc.verdict.judge import size

RECORDS = Path(__file__).parents[2] / "benchmarks" / "recordings" / "reserved"
SMALL = (
    *("num_layers=4", "hidden_size=256", "num_attention_heads=4", "num_key_value_heads=4", "head_dim=64"),
    *("intermediate_size=1024", "vocab_size=8192", "tie_word_embeddings=false", "b=1", "s=512", "recipe=pure"),
    "pipeline_parallel=2",
)
HIDDEN = 2 * 512 * 256  # bytes of b=1, s=512, d=256 in bf16


def small(*words: str) -> Spec:
    return memcalc.load("llama-3.2-1b", *SMALL, *words)


def order(spec: Spec, stage: int) -> str:
    """F and B of each micro-batch, with the chunk where there are several."""
    several = spec.parallelism.virtual_stages > 1
    acts = [each for each in actions_of(spec, stages_of(spec)[stage]) if each.kind in ("forward", "backward")]
    return " ".join(f"{each.kind[0].upper()}{each.micro_batch}{'ab'[each.chunk] if several else ''}" for each in acts)


def test_orders_of_the_schedules() -> None:
    """Four micro-batches on two stages: 1F1B has p - i forwards ahead of the first backward."""
    four = "gradient_accumulation_steps=4"

    assert order(small(four), 0) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert order(small(four), 1) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert order(small(four, "schedule=gpipe"), 1) == "F0 F1 F2 F3 B0 B1 B2 B3"
    two = small("gradient_accumulation_steps=2", "schedule=interleaved", "virtual_stages=2")
    assert order(two, 0) == "F0a F1a F0b F1b B0b B1b B0a B1a"
    assert order(two, 1) == "F0a F1a F0b B0b F1b B1b B0a B1a"


@pytest.mark.parametrize("words", [(), ("schedule=gpipe",), ("schedule=interleaved", "virtual_stages=2")])
def test_everything_of_a_step_is_freed_but_its_states(words: tuple[str, ...]) -> None:
    """After the third step: weights, gradients, two moments, the batch, receive buffers and workspaces are left."""
    spec = small("gradient_accumulation_steps=4", *words)
    for stage in stages_of(spec):
        live: dict[int, int] = {}
        number = 0
        for stretch in run_requests(spec, stage).stretches:
            for change in stretch.script:
                if change < 0:
                    del live[~change]
                else:
                    live[number] = change
                    number += 1
        weights = sum(held.count * held.elements for held in stage_parameters(spec, stage))
        received = sum(item.count * item.each for item in of_engine(spec, stage) if item.mask & BIT["optimizer_step_2"])
        batch, workspaces = 2 * 4 * 8 * 512, 2 * (2 * 4096 + 8 * 16) * 2**10
        # bf16 weights, gradients and two moments; the optimizer counts its steps on the host
        assert sum(live.values()) == 4 * 2 * weights + received + batch + workspaces


@cache
def recorded() -> tuple[dict[str, Any], ...]:
    """Stages run by PyTorch's schedules on the null CUDA device."""
    paths = sorted(RECORDS.glob("*-pipelines*.jsonl"))
    return tuple(json.loads(line) for path in paths for line in path.read_text().splitlines())


@pytest.mark.parametrize("record", recorded(), ids=lambda record: record["case"][:60])
def test_recorded_stages(record: dict[str, Any]) -> None:
    spec = load(record["spec"], (), gpu=record["device"].partition(":")[2])
    rank = int(record["case"].partition(" rank=")[2])
    assert not unsupported_reason(spec)
    found = simulate(spec, stage=stages_of(spec)[rank * spec.parallelism.pipeline_parallel // spec.parallelism.ranks])
    allocated = max(whole for whole, _ in found.tops.values())

    assert abs(max(record["phases"].values()) / allocated - 1) <= 0.001
    assert abs(max(record["reserved"].values()) / found.reserved_bytes - 1) <= 0.01


def test_formulas_count_what_stages_receive() -> None:
    """Stage 1 of 1F1B, between steps: four micro-batches' activations received, of which none is in flight."""
    spec = small("gradient_accumulation_steps=4")
    ledger = next(each for each in estimate(spec).ranks if each.rank == {"pipeline_stage": 1}).ledger
    rows = [row for row in ledger.rows if row.tensor == "activations received" and "optimizer_step_2" in row.phases]

    assert sum(row.bytes for row in rows) == 4 * HIDDEN


@pytest.mark.parametrize("words", [(), ("schedule=gpipe",), ("schedule=interleaved", "virtual_stages=2")])
def test_formulas_are_no_more_than_the_replay(words: tuple[str, ...]) -> None:
    """The verdict's lower bound."""
    spec = small("gradient_accumulation_steps=4", *words)
    ledgers = {each.rank["pipeline_stage"]: each.ledger for each in estimate(spec).ranks}
    for stage in stages_of(spec):
        allocated = max(whole for whole, _ in simulate(spec, stage=stage).tops.values())
        assert 0.98 * allocated <= ledgers[stage.index].peak_bytes <= allocated


@pytest.mark.parametrize("words", [(), ("schedule=interleaved", "virtual_stages=2")])
def test_many_micro_batches_repeat_the_first(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rounds as are played need what all of them need; buffers are for all micro-batches either way."""
    spec = small("gradient_accumulation_steps=24", *words)
    played = [simulate(spec, stage=stage).reserved_bytes for stage in stages_of(spec)]
    monkeypatch.setattr(schedules, "ROUNDS_PLAYED", 12)

    assert [simulate(spec, stage=stage).reserved_bytes for stage in stages_of(spec)] == played


def test_the_verdict_is_of_the_worst_stage() -> None:
    """The last stage has the logits of a large vocabulary; each stage is shown with its own reserved memory."""
    spec = memcalc.load("llama-3.2-1b", *SMALL, "vocab_size=128256", "gradient_accumulation_steps=4", gpu="h100-80gb")
    result = size(spec)
    of_stage = {each.rank["pipeline_stage"]: each.memory().reserved_bytes for each in result.ranks}

    assert of_stage == {stage.index: simulate(spec, stage=stage).reserved_bytes for stage in stages_of(spec)}
    assert result.judgement is not None
    assert result.judgement.interval is not None
    assert max(of_stage, key=lambda stage: of_stage[stage] or 0) == 1
