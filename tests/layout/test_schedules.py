"""Pipeline schedules against the figures of their papers: what a stage holds, and how much is in flight."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from memcalc.api import estimate, load
from memcalc.layout.local_parameters import stage_parameters
from memcalc.layout.schedules import chunks_in_flight, chunks_of, in_flight_micro_batches
from memcalc.layout.stages import stages_of
from memcalc.ledger.component import Component

MANY = 1000  # micro-batches

SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe", "dualpipe-v", "interleaved")


def micro_batches(schedule: str, stages: int, stage: int, count: int = MANY, virtual: int = 1) -> Fraction:
    """In flight, in units of one micro-batch through L/p layers."""
    copies = chunks_in_flight(schedule, stages, virtual, stage, count)
    parts = chunks_of(schedule, stages, virtual, stage)[0].of
    return Fraction(copies * stages, parts)


def test_gpipe_holds_every_micro_batch() -> None:
    assert [micro_batches("gpipe", 4, stage, 6) for stage in range(4)] == [6, 6, 6, 6]


def test_1f1b_holds_one_less_on_each_stage() -> None:
    """p - i (arXiv 2104.04473 section 2.2); never more than there are."""
    assert [micro_batches("1f1b", 4, stage) for stage in range(4)] == [4, 3, 2, 1]
    assert [micro_batches("1f1b", 4, stage, 2) for stage in range(4)] == [2, 2, 2, 1]


@pytest.mark.parametrize(("p", "v"), [(8, 3), (35, 3), (4, 2)])
def test_interleaving_multiplies_by_one_and_p_less_one_over_p_v(p: int, v: int) -> None:
    """Stage 0: L(1 + (p-1)/(pv)) layers, that is p(1 + (p-1)/(pv)) = (pv+p-1)/v times L/p (arXiv 2205.05198)."""
    assert micro_batches("interleaved", p, 0, virtual=v) == p * (1 + Fraction(p - 1, p * v))


def test_interleavings_last_stage_warms_up_for_the_other_chunks_alone() -> None:
    """(v-1)p warm-up chunks and the one at hand, of v to a micro-batch."""
    assert micro_batches("interleaved", 4, 3, virtual=2) == Fraction(5, 2)


def test_zero_bubble_by_its_tables() -> None:
    """arXiv 2401.10241 table 2: p and 2p-1 micro-batches; arXiv 2405.15362: p, (p+2)//2, (p+4)//3, here for p = 8."""
    found = {name: micro_batches(name, 8, 0) for name in ("zb-h1", "zb-h2", "zb-v", "v-half", "v-min")}

    assert found == {"zb-h1": 8, "zb-h2": 15, "zb-v": 8, "v-half": 5, "v-min": 4}


def test_dualpipe_by_its_table() -> None:
    """PP+1 chunks of L/PP layers on each of PP devices, with the weights twice; DualPipeV on PP/2 devices."""
    assert [micro_batches("dualpipe", 8, stage) for stage in (0, 3, 7)] == [9, 9, 9]
    assert chunks_in_flight("dualpipe-v", 4, 1, 0, MANY) == 8 + 1


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [2, 4, 6])
def test_stages_hold_every_part_once_and_dualpipe_twice(schedule: str, stages: int) -> None:
    virtual = 3 if schedule == "interleaved" else 1
    held = [chunk for stage in range(stages) for chunk in chunks_of(schedule, stages, virtual, stage)]

    assert sorted(chunk.part for chunk in held) == sorted([*range(held[0].of)] * (2 if schedule == "dualpipe" else 1))


MODEL: dict[str, Any] = {"l": 12, "d": 64, "h": 4, "V": 100, "position_embedding": "rope", "tie_word_embeddings": False}


def run(schedule: str, stages: int = 4, **training: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "training": {"s": 64, "gradient_accumulation_steps": 24, "recipe": "mixed-18"} | training,
        "parallelism": {
            "pipeline_parallel": stages,
            "schedule": schedule,
            "virtual_stages": 3 if schedule == "interleaved" else 1,
        },
    }


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_parameters_of_the_stages_are_the_models(schedule: str) -> None:
    """Twice with DualPipe."""
    spec = load(run(schedule))
    held = sum(row.count * row.elements for stage in stages_of(spec) for row in stage_parameters(spec, stage))
    whole = estimate({"model": MODEL}).parameters

    assert held == whole * (2 if schedule == "dualpipe" else 1)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_activations_at_the_end_of_forward_are_the_layers_in_flight(schedule: str) -> None:
    """Each of the copies in flight is one chunk's layers; without a pipeline one micro-batch is all of them."""
    layer = kept(estimate({"model": MODEL | {"l": 1}, "training": {"s": 64, "recipe": "mixed-18"}}).ledger)
    spec = load(run(schedule))
    for rank in estimate(run(schedule)).ranks:
        stage = next(stage for stage in stages_of(spec) if stage.index == rank.rank["pipeline_stage"])
        chunk = stage.chunks[0].stop - stage.chunks[0].first
        assert kept(rank.ledger) == stage.in_flight * chunk * layer


def kept(ledger: Any) -> int:
    """Bytes that layers keep at the end of forward."""
    return sum(
        row.bytes
        for row in ledger.rows
        if row.component is Component.ACTIVATIONS and row.module.startswith("layers") and "loss_1" in row.phases
    )


def test_every_stage_has_the_rotary_tables_of_its_micro_batches() -> None:
    """Two tables of s·d_h in bf16 for each micro-batch in flight: 4, 3, 2, 1 of them."""
    found = {}
    for rank in estimate(run("1f1b")).ranks:
        rows = [row for row in rank.ledger.rows if row.tensor in ("cosines", "sines") and "loss_1" in row.phases]
        found[rank.rank["pipeline_stage"]] = sum(row.bytes for row in rows)

    assert found == {stage: (4 - stage) * 2 * 64 * 16 * 2 for stage in range(4)}


def test_later_stages_have_the_mask_of_eager_attention() -> None:
    """s·s bytes for each micro-batch in flight."""
    ranks = estimate(run("1f1b", attention="eager")).ranks
    masks = {
        rank.rank["pipeline_stage"]: sum(
            row.bytes for row in rank.ledger.rows if row.tensor == "causal mask" and "loss_1" in row.phases
        )
        for rank in ranks
    }

    assert masks == {stage: (4 - stage) * 64 * 64 for stage in range(4)}


def test_a_longer_pipeline_schedule_needs_no_more_by_v_min_than_by_any_other() -> None:
    peaks = {
        schedule: estimate(run(schedule)).ledger.components("loss_2")[Component.ACTIVATIONS] for schedule in SCHEDULES
    }

    assert peaks["v-min"] <= peaks["v-half"] <= peaks["zb-v"]
    assert peaks["1f1b"] <= peaks["interleaved"] <= peaks["zb-h2"] <= peaks["gpipe"]


@pytest.mark.parametrize(("p", "v", "m"), [(2, 16, 4), (4, 3, 8), (4, 2, 16), (8, 2, 8)])
def test_interleaving_step_by_step(p: int, v: int, m: int) -> None:
    """Megatron-LM's order: p micro-batches through a chunk, p through the next; the last chunk's backward comes first.

    After 2(p-i-1) + (v-1)p forwards every forward is followed by a backward. Counted copy by copy: all chunks of each
    stage, the first chunk of the first stage, the last chunk of the last one.
    """
    order = [chunk for _ in range(m // p) for chunk in range(v) for _ in range(p)]
    for stage in range(p):
        warm_up = min(2 * (p - stage - 1) + (v - 1) * p, len(order))
        held, most, most_of = [0] * v, 0, [0] * v
        for step in range(len(order) + warm_up):
            if step < len(order):
                held[order[step]] += 1
            most, most_of = max(most, sum(held)), [max(pair) for pair in zip(most_of, held, strict=True)]
            if step >= warm_up:
                held[v - 1 - order[step - warm_up]] -= 1

        first, last, _ = in_flight_micro_batches("interleaved", p, v, stage, m)
        assert most == chunks_in_flight("interleaved", p, v, stage, m)
        if stage == 0:
            assert first == most_of[0]
        if stage == p - 1:
            assert last == most_of[-1] == 1


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v", "v-half", "v-min", "dualpipe", "dualpipe-v"])
def test_stages_of_several_chunks_hold_the_logits_of_one_micro_batch(schedule: str) -> None:
    """As the last stage of 1F1B does, of 24 micro-batches."""

    def logits(name: str) -> int:
        ledgers = [rank.ledger.components("loss_2") for rank in estimate(run(name, stages=2)).ranks]
        return max(components.get(Component.LOGITS_AND_LOSS, 0) for components in ledgers)

    assert logits(schedule) == logits("1f1b") > 0


@pytest.mark.parametrize(("schedule", "waiting"), [("zb-h1", 3), ("zb-h2", 6)])
def test_heads_that_wait_for_their_weights_gradient(schedule: str, waiting: int) -> None:
    """Of 4 stages the last has one micro-batch's logits whole, as in 1F1B, and 4-1 or 2·4-2 others behind its backward.

    Of these it holds the input of the head's matrix and the gradient of its output: 2 bytes per element each in bf16.
    """

    def held(name: str) -> int:
        split = ("pipeline_parallel=4", "gradient_accumulation_steps=16", f"schedule={name}", "s=512")
        ranks = estimate("llama-3-8b", *split).ranks
        (last,) = (rank for rank in ranks if rank.rank["pipeline_stage"] == 3)
        return last.ledger.components("loss_2")[Component.LOGITS_AND_LOSS]

    assert held(schedule) - held("1f1b") == waiting * (2 * 512 * 4096 + 2 * 512 * 128_256)


def test_logits_of_llama_3_8b_over_two_stages_of_sixteen_chunks() -> None:
    """One micro-batch of 2,048 tokens, half of 128,256 words: bf16 logits, a copy and log-probabilities in fp32.

    2 + 4 + 4 bytes per logit; beside them the last norm's input and output, 2 bytes each of 2,048 x 4,096, and its
    reciprocal deviation, 4 bytes per token; and the loss with its weight, while all these are still named.
    """
    split = (
        "engine=megatron",
        "implementation=plain",
        "recipe=mixed-18",
        "tensor_parallel=2",
        "pipeline_parallel=2",
        "schedule=interleaved",
        "virtual_stages=16",
    )
    ranks = {
        rank.rank["pipeline_stage"]: rank
        for rank in estimate("llama-3-8b", *split, "gradient_accumulation_steps=4").ranks
    }
    held = ranks[1].ledger.components("loss_2")[Component.LOGITS_AND_LOSS]

    assert held == 10 * 2048 * 128_256 // 2 + 2 * 2 * 2048 * 4096 + 4 * 2048 + 4 + 4


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("count", [1, 3, 8, MANY])
def test_no_later_stage_has_more_in_flight(schedule: str, stages: int, count: int) -> None:
    """So the first stage of those that are identical needs most."""
    virtual = 3 if schedule == "interleaved" else 1
    held = [chunks_in_flight(schedule, stages, virtual, stage, count) for stage in range(stages)]

    assert held == sorted(held, reverse=True)


def test_no_row_of_an_interleaved_schedule_lives_in_no_phase() -> None:
    """Under FSDP2 unsharded gradients of a chunk exist only between its micro-batches."""
    layout = ("pipeline_parallel=2", "schedule=interleaved", "virtual_stages=2", "gradient_accumulation_steps=2")
    fsdp = ("data_parallel=2", "zero_stage=2", "engine=fsdp2", "recipe=fp32", "fsdp.param_dtype=bf16")
    result = estimate("gpt2", *layout, *fsdp)

    assert [row.tensor for rank in result.ranks for row in rank.ledger.rows if not row.phases] == []
