"""What DeepSpeed's pipeline engine and BF16_Optimizer hold, by hand for a small GPT on four stages."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.errors import InputError, InputErrors
from memcalc.layout.local_parameters import stage_parameters
from memcalc.layout.stages import stages_of
from memcalc.ledger.component import Component
from memcalc.ledger.ledger import Ledger
from memcalc.ledger.row_drafts import BIT, RowDraft
from memcalc.spec.spec import Spec
from memcalc.states.optimizers.parameter_order import in_order
from memcalc.states.pipeline_engine import kept_between_passes, kept_in_flight

LAYERS, WIDTH, HEADS, VOCAB, LENGTH, BATCH, STAGES, MICRO_BATCHES = 8, 1024, 16, 50_304, 1024, 2, 4, 8
HIDDEN = 2 * BATCH * LENGTH * WIDTH  # bytes of the hidden states of a micro-batch
LOGITS = 4 * BATCH * LENGTH * VOCAB  # in fp32
LAYER = 12 * WIDTH**2 + 13 * WIDTH  # parameters
MIXED_20 = {"recipe": "mixed-20", "dtype": "bf16"}
BF16_OPTIMIZER = {"zero_optimization": {"bf16_optimizer": True}}


def gpt(training: dict[str, Any] | None = None, **parallelism: Any) -> Spec:
    model = {
        "num_layers": LAYERS,
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": LENGTH,
    }
    step = {"dtype": "fp16", "recipe": "mixed-16", "dropout": 0.1, "logits_dtype": "fp32", "attention": "eager"}
    step |= {"micro_batch_size": BATCH, "sequence_length": LENGTH, "gradient_accumulation_steps": MICRO_BATCHES}
    step |= {"optimizer_implementation": "fused", "recompute": "full"}
    ranks = {"engine": "deepspeed", "zero_stage": 1, "pipeline_parallel": STAGES, "data_parallel": 2}
    return memcalc.load({"model": model, "training": step | (training or {}), "parallelism": ranks | parallelism})


def bytes_in(phase: str, rows: list[RowDraft], *names: str) -> int:
    found = [row for row in rows if row.mask & BIT[phase] and (not names or row.tensor in names)]
    return sum(row.count * row.each for row in found)


def ledger_of(spec: Spec, stage: int) -> Ledger:
    return next(rank.ledger for rank in memcalc.estimate(spec).ranks if rank.rank["pipeline_stage"] == stage)


def test_each_micro_batch_in_flight_keeps_its_input_and_output() -> None:
    """Three micro-batches are in flight on the second of four stages; forward reads a copy of the input.

    Of each, three tensors are a layer's input: the received one, and those that its two layers save.
    """
    spec = gpt()
    stage = stages_of(spec)[1]
    rows = ledger_of(spec, 1).live_rows("forward_2")

    assert stage.in_flight == 3
    assert sum(row.count for row in rows if row.tensor == "layer input") == 3 * 3
    assert sum(row.count for row in rows if row.tensor == "layer output") == 2  # of the other micro-batches


def test_a_stage_receives_activations_and_gradients_in_one_buffer() -> None:
    """The first stage receives gradients alone, from its first backward on."""
    spec = gpt()
    first, second, *_, last = stages_of(spec)

    for stage in (second, last):
        assert bytes_in("forward_1", [*kept_between_passes(spec, stage)], "activation received") == HIDDEN
    assert not bytes_in("optimizer_step_2", [*kept_between_passes(spec, second)], "gradient received")
    gradients = [*kept_between_passes(spec, first)]
    assert bytes_in("optimizer_step_2", gradients) == HIDDEN
    assert not bytes_in("forward_1", gradients)


def test_the_first_stage_keeps_masks_of_dropout_and_token_ids() -> None:
    """Four micro-batches are in flight, in four buffers; forward reads copies of token and position ids."""
    rows = ledger_of(gpt(), 0).live_rows("forward_2")
    mask, ids = BATCH * LENGTH * WIDTH, 8 * BATCH * LENGTH

    assert sum(row.bytes for row in rows if row.tensor == "embedding dropout mask") == 4 * mask
    loaded = [row for row in rows if row.tensor == "token and position ids"]
    copied = [row for row in rows if row.tensor in ("embed_tokens indices", "embed_positions indices")]
    assert sum(row.bytes for row in loaded) == sum(row.bytes for row in copied) == 4 * 2 * ids


def test_the_last_stage_loads_labels_for_each_buffer() -> None:
    rows = ledger_of(gpt(), STAGES - 1).live_rows("optimizer_step_2")

    assert [(row.tensor, row.bytes) for row in rows if row.component is Component.INPUTS] == [
        ("labels", 2 * 8 * BATCH * LENGTH)
    ]


def test_the_tied_module_of_the_last_stage_has_unused_positions() -> None:
    """The position embedding has states and a place in the flat tensor, but no backward makes its gradient."""
    spec = gpt()
    first, *_, last = (stage_parameters(spec, stage) for stage in stages_of(spec))
    unused = [held for held in last if held.unused]

    assert [(held.module, held.shape) for held in unused] == [("embed_positions", (LENGTH, WIDTH))]
    assert [held.module for held in in_order(last, "")][:2] == ["lm_head", "embed_positions"]
    assert [held.module for held in last if held.replica] == ["lm_head", "embed_positions"]
    assert not any(held.replica or held.unused for held in first)
    of_positions = [row.tensor for row in ledger_of(spec, STAGES - 1).rows if row.module == "embed_positions"]
    assert "weight whole gradient" not in of_positions
    assert {"weight", "weight master", "weight first moment"} <= set(of_positions)


def test_ranks_of_a_tensor_parallel_group_send_their_part() -> None:
    """Forward reads the gathered input in place of the received part; backward gathers output and gradient."""
    spec = gpt({"loss": "vocab-parallel"}, tensor_parallel=2)
    rows = [*kept_in_flight(spec, stages_of(spec)[1], 3)]

    assert bytes_in("forward_2", rows) == 3 * HIDDEN // 2
    assert bytes_in("backward_2", rows) == 3 * HIDDEN // 2 + 2 * HIDDEN


@pytest.mark.parametrize(("micro_batches", "in_backward", "between"), [(MICRO_BATCHES, 1, 2), (1, 0, 1)])
def test_two_buffers_of_the_last_stage_keep_logits(micro_batches: int, in_backward: int, between: int) -> None:
    """The logits of the current micro-batch are counted with the loss."""
    spec = gpt({"gradient_accumulation_steps": micro_batches})
    rows = [*kept_between_passes(spec, stages_of(spec)[-1])]

    name = "logits of earlier micro-batches"
    assert bytes_in("backward_2", rows, name) == in_backward * LOGITS
    assert bytes_in("optimizer_step_1", rows, name) == between * LOGITS


def test_masks_that_are_passed_on() -> None:
    """One for all sequences, twice as bool for each micro-batch, and sent as fp16."""
    shared, each = (gpt(pipeline_tensors=name) for name in ("with-shared-mask", "with-masks"))
    plain = bytes_in("forward_2", [*kept_in_flight(gpt(), stages_of(shared)[1], 3)])

    for spec, masks in ((shared, 1), (each, BATCH)):
        rows = [*kept_in_flight(spec, stages_of(spec)[1], 3)]
        assert bytes_in("forward_2", rows) - plain == masks * LENGTH**2 * (2 * 3 + 2)


def test_one_stage_is_a_pipeline_only_if_the_program_says_so() -> None:
    alone: dict[str, Any] = {"pipeline_parallel": 1}

    assert not gpt(**alone).parallelism.has_pipeline_engine
    assert gpt(**alone, pipeline_tensors="hidden-states").parallelism.has_pipeline_engine
    assert not gpt(pipeline_tensors="none").parallelism.has_pipeline_engine


@pytest.mark.parametrize("micro_batches", [MICRO_BATCHES, STAGES])
def test_the_reduction_has_a_bucket_of_its_own(micro_batches: int) -> None:
    """5e8 elements in fp16 for backward and as many for reduce_gradients, once no micro-batch is in flight.

    With as many micro-batches as stages the first stage's first backward finds no bucket of an earlier one.
    """
    rows = ledger_of(gpt({"gradient_accumulation_steps": micro_batches}), 0).rows
    buckets = [row for row in rows if row.tensor == "reduce bucket" and "backward_2" in row.phases]

    assert sum(row.bytes for row in buckets) == 2 * 10**9


def test_bf16_optimizer_sums_gradients_on_each_rank() -> None:
    """2 bytes of gradients and 4 of their sums for each parameter of two layers; master weights and moments over 2."""
    ledger = ledger_of(gpt(MIXED_20, **BF16_OPTIMIZER), 1)
    parts = ledger.components("optimizer_step_2")

    assert parts[Component.GRADIENTS] == (2 + 4) * 2 * LAYER
    assert parts[Component.MASTER_WEIGHTS] == 4 * 2 * LAYER // 2
    assert ledger.components("zero_grad_1")[Component.GRADIENTS] == 4 * 2 * LAYER


def test_sums_in_bf16() -> None:
    """2 bytes of gradients, 2 of sums, and in the step 4 of the rank's half."""
    ledger = ledger_of(gpt(MIXED_20 | {"gradient_dtype": "bf16"}, **BF16_OPTIMIZER), 1)

    assert ledger.components("optimizer_step_2")[Component.GRADIENTS] == (2 + 2) * 2 * LAYER + 4 * LAYER


@pytest.mark.parametrize(
    ("training", "parallelism", "field"),
    [
        ({}, BF16_OPTIMIZER, "dtype"),
        (MIXED_20, {**BF16_OPTIMIZER, "zero_stage": 0}, "zero_stage"),
        (MIXED_20 | {"recipe": "pure"}, BF16_OPTIMIZER, "recipe"),
        ({}, {"engine": "ddp", "zero_stage": 0, "pipeline_tensors": "hidden-states"}, "pipeline_tensors"),
        ({}, {"pipeline_parallel": 11, "pipeline_split": "layers-and-ends"}, "pipeline_parallel"),
    ],
)
def test_what_does_not_go_together(training: dict[str, Any], parallelism: dict[str, Any], field: str) -> None:
    with pytest.raises((InputError, InputErrors)) as error:
        gpt(training, **parallelism)

    assert field in str(error.value)
