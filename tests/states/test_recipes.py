"""The recipe table: which copies of each parameter the ledger holds, in how many bytes, and in which phases."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.layout.parameters import parameter_table
from memcalc.ledger.component import Component
from memcalc.ledger.ledger import Ledger
from memcalc.ledger.textbook import zero_model_state_bytes
from memcalc.spec.recipes import RECIPES

L, D, V, S = 2, 64, 96, 32
MODEL = {
    "num_layers": L,
    "hidden_size": D,
    "num_attention_heads": 4,
    "vocab_size": V,
    "max_position_embeddings": S,
    "tie_word_embeddings": False,
}
LAYER = 12 * D**2 + 13 * D  # 49 984 parameters
P = L * LAYER + 2 * V * D + S * D + 2 * D  # two layers, embedding and head, positions, final norm: 114 432

BEFORE_STEP = ("zero_grad_1", "forward_1", "loss_1")
STEP = ("optimizer_step_1", "zero_grad_2", "optimizer_step_2")
COPIES = (Component.WEIGHTS, Component.MASTER_WEIGHTS, Component.GRADIENTS, Component.OPTIMIZER_STATE)
W, M, G, O = COPIES  # noqa: E741 -- the four letters that the table below is written in

Copies = dict[tuple[Component, str], int]


def ledger(recipe: str, *overrides: str, **training: Any) -> Ledger:
    dtype = "fp32" if recipe == "fp32" else "bf16"
    run = {"model": MODEL, "training": {"recipe": recipe, "dtype": dtype} | training}
    return memcalc.estimate(run, *overrides).ledger


def copies(run: Ledger, phase: str) -> Copies:
    """Bytes a parameter of every copy in one phase."""
    held: Copies = {}
    for row in run.live_rows(phase):
        if row.component in COPIES:
            key = (row.component, row.dtype)
            held[key] = held.get(key, 0) + row.bytes
    assert all(amount % P == 0 for amount in held.values()), held
    return {key: amount // P for key, amount in held.items()}


# -- the table ---------------------------------------------------------------------------------------------------------

# Bytes a parameter of each copy: as the model is built, with its optimizer, in the step, at the next zero_grad before
# it is freed, and in the next forward.
TABLE: dict[str, dict[str, Copies]] = {
    "fp32": {
        "model": {(W, "fp32"): 4},
        "optimizer": {(W, "fp32"): 4},
        "step": {(W, "fp32"): 4, (G, "fp32"): 4, (O, "fp32"): 8},
        "zero_grad": {(W, "fp32"): 4, (G, "fp32"): 4, (O, "fp32"): 8},
        "forward": {(W, "fp32"): 4, (O, "fp32"): 8},
    },
    "amp": {
        "model": {(W, "fp32"): 4},
        "optimizer": {(W, "fp32"): 4},
        "step": {(W, "fp32"): 4, (G, "fp32"): 4, (O, "fp32"): 8},
        "zero_grad": {(W, "fp32"): 4, (G, "fp32"): 4, (O, "fp32"): 8},
        "forward": {(W, "fp32"): 4, (O, "fp32"): 8},
    },
    "pure": {
        "model": {(W, "bf16"): 2},
        "optimizer": {(W, "bf16"): 2},
        "step": {(W, "bf16"): 2, (G, "bf16"): 2, (O, "bf16"): 4},
        "zero_grad": {(W, "bf16"): 2, (G, "bf16"): 2, (O, "bf16"): 4},
        "forward": {(W, "bf16"): 2, (O, "bf16"): 4},
    },
    "mixed-16": {
        "model": {(W, "bf16"): 2},
        "optimizer": {(W, "bf16"): 2, (M, "fp32"): 4},
        "step": {(W, "bf16"): 2, (M, "fp32"): 4, (G, "bf16"): 2, (G, "fp32"): 4, (O, "fp32"): 8},
        "zero_grad": {(W, "bf16"): 2, (M, "fp32"): 4, (G, "bf16"): 2, (O, "fp32"): 8},
        "forward": {(W, "bf16"): 2, (M, "fp32"): 4, (O, "fp32"): 8},
    },
    "mixed-18": {
        "model": {(W, "bf16"): 2},
        "optimizer": {(W, "bf16"): 2, (M, "fp32"): 4, (G, "fp32"): 4},
        "step": {(W, "bf16"): 2, (M, "fp32"): 4, (G, "fp32"): 4, (O, "fp32"): 8},
        "zero_grad": {(W, "bf16"): 2, (M, "fp32"): 4, (G, "fp32"): 4, (O, "fp32"): 8},
        "forward": {(W, "bf16"): 2, (M, "fp32"): 4, (G, "fp32"): 4, (O, "fp32"): 8},
    },
    "mixed-20": {
        "model": {(W, "bf16"): 2},
        "optimizer": {(W, "bf16"): 2, (M, "fp32"): 4},
        "step": {(W, "bf16"): 2, (M, "fp32"): 4, (G, "bf16"): 2, (G, "fp32"): 4, (O, "fp32"): 8},
        "zero_grad": {(W, "bf16"): 2, (M, "fp32"): 4, (G, "bf16"): 2, (G, "fp32"): 4, (O, "fp32"): 8},
        "forward": {(W, "bf16"): 2, (M, "fp32"): 4, (O, "fp32"): 8},
    },
}


def test_the_table_has_every_recipe() -> None:
    assert {*TABLE, "fp32-main"} == set(RECIPES)  # which Megatron-LM alone has: tests/architectures/test_megatron.py


@pytest.mark.parametrize("recipe", TABLE)
def test_each_copy_lives_in_its_phases(recipe: str) -> None:
    run = ledger(recipe)
    expected = TABLE[recipe]
    when = {
        "model": ("model",),
        "optimizer": ("optimizer", "input", *BEFORE_STEP),
        "step": ("optimizer_step_1", "optimizer_step_2"),
        "zero_grad": ("zero_grad_2",),
        "forward": ("forward_2", "loss_2"),
    }

    for column, phases in when.items():
        for phase in phases:
            assert copies(run, phase) == expected[column], phase


@pytest.mark.parametrize("recipe", TABLE)
def test_backward_holds_what_forward_held_and_gradients_in_the_making(recipe: str) -> None:
    """In its peak some gradients are not made yet, and none is held in more copies than the step finds."""
    run = ledger(recipe)
    for step, before in ((1, "loss_1"), (2, "loss_2")):
        backward = run.components(f"backward_{step}")
        held = run.components(before)

        assert {c: backward.get(c) for c in (W, M, O)} == {c: held.get(c) for c in (W, M, O)}
        assert held.get(G, 0) <= backward[G] <= held.get(G, 0) + run.components("optimizer_step_1")[G]


@pytest.mark.parametrize(
    ("recipe", "total"), [("fp32", 16), ("amp", 16), ("pure", 8), ("mixed-16", 16), ("mixed-18", 18), ("mixed-20", 20)]
)
def test_the_copies_together_are_the_published_count(recipe: str, total: int) -> None:
    """At the zero_grad that follows a step, before it frees anything."""
    held = ledger(recipe).components("zero_grad_2")

    assert sum(held[component] for component in COPIES if component in held) == total * P
    assert RECIPES[recipe].textbook_bytes == total


def test_mixed_18_adds_each_gradient_to_the_main_one_and_drops_it() -> None:
    """Beside the fp32 buffer of 4 P bytes, backward holds 16-bit gradients of one operator at a time."""
    run = ledger("mixed-18")
    in_flight = [row for row in run.live_rows("backward_1", G) if row.dtype == "bf16"]

    assert run.components("forward_1")[G] == 4 * P
    assert sum(row.bytes for row in in_flight) <= 2 * (4 * D**2 + D)  # the largest matrix of a layer and its bias
    assert all(row.count == 1 for row in in_flight)


# -- autocast ----------------------------------------------------------------------------------------------------------


def cache(run: Ledger, phase: str) -> dict[str, int]:
    return {row.tensor: row.bytes for row in run.live_rows(phase) if row.tensor.endswith("(autocast cache)")}


def test_autocast_caches_a_16_bit_copy_of_every_matrix_and_its_bias_until_forward_ends() -> None:
    """2 bytes for each of l (12 d² + 9 d) of the layers and V d of the head; embeddings and norms are not cast."""
    run = ledger("amp")

    for phase in ("forward_1", "loss_1", "forward_2", "loss_2"):
        assert sum(cache(run, phase).values()) == 2 * (L * (12 * D**2 + 9 * D) + V * D), phase
        assert {row.component for row in run.live_rows(phase) if "cache" in row.tensor} == {Component.TEMPORARIES}


def test_of_autocasts_cache_only_what_backward_still_needs_outlives_forward() -> None:
    """Biases go with the region; a weight's cast stays until its layer's backward has used it."""
    run = ledger("amp")

    for phase in ("backward_1", "backward_2"):
        assert not [name for name in cache(run, phase) if ".bias" in name]
    for phase in ("model", "optimizer", "input", "zero_grad_1", *STEP):
        assert not cache(run, phase)


def test_other_recipes_cast_nothing() -> None:
    for recipe in set(TABLE) - {"amp"}:
        run = ledger(recipe)
        assert not any(cache(run, phase) for phase in run.phases)


# -- gradients between steps -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("recipe", "gradients"), [("fp32", 4), ("pure", 2), ("mixed-16", 2), ("mixed-20", 6)])
def test_gradients_filled_with_zeros_live_through_the_next_forward(recipe: str, gradients: int) -> None:
    """With set_to_none they are gone; before the first backward there are none either way."""
    for zero_grad, second in (("zero", gradients * P), ("set_to_none", 0)):
        run = ledger(recipe, zero_grad=zero_grad)
        held = {phase: run.components(phase).get(G, 0) for phase in run.phases}

        assert [held[phase] for phase in BEFORE_STEP] == [0, 0, 0]
        assert held["zero_grad_2"] == gradients * P
        assert held["forward_2"] == held["loss_2"] == second


@pytest.mark.parametrize(("recipe", "gradients"), [("fp32", 4), ("pure", 2), ("mixed-16", 2), ("mixed-20", 6)])
def test_accumulation_holds_the_gradients_of_earlier_micro_batches(recipe: str, gradients: int) -> None:
    """Phases show the last micro-batch of a step: its forward finds whole gradients, the zero_grad of step 1 none."""
    run = ledger(recipe, gradient_accumulation_steps=2)
    held = {phase: run.components(phase).get(G, 0) for phase in run.phases}

    assert held["zero_grad_1"] == 0
    assert held["forward_1"] == held["loss_1"] == held["forward_2"] == held["loss_2"] == gradients * P
    assert held["backward_1"] >= gradients * P


def test_gradients_that_exist_are_added_to_one_operator_at_a_time() -> None:
    """A second backward makes no second set: at most one operator's own gradients lie beside the whole ones."""
    run = ledger("pure", gradient_accumulation_steps=2)

    assert run.components("backward_2")[G] <= 2 * P + 2 * (4 * D**2 + D)


# -- sharding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "stage"), [("deepspeed", 1), ("deepspeed", 2), ("deepspeed", 3), ("fsdp2", 2), ("fsdp2", 3)]
)
@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_zero_shards_as_its_paper_counts(engine: str, stage: int, ranks: int) -> None:
    """2 of weights from stage 3 on, 2 of gradients from 2, 12 of master and moments from 1; every axis divides by N.

    In the step, without the fp32 gradients that are made for it. DeepSpeed's stage 1 frees what is another rank's share
    as soon as it is reduced, as stage 2 does; FSDP2's stage 2 holds shards outside forward and backward, as stage 3.
    With a group of parameters without weight decay 16-bit gradients are there until its update, the last one.
    """
    groups = ("zero_optimization.separate_no_decay=true",) if engine == "deepspeed" else ()
    run = ledger("mixed-16", f"zero_stage={stage}", f"data_parallel={ranks}", f"engine={engine}", *groups)
    rows = [row for row in run.rows if "optimizer_step_2" in row.phases and not row.tensor.endswith("gradient in fp32")]
    held = {component: sum(row.bytes for row in rows if row.component is component) for component in COPIES}

    as_of = 3 if engine == "fsdp2" else max(stage, 2)
    assert sum(held.values()) == zero_model_state_bytes(P, ranks, as_of)
    assert held[W] == 2 * P // (ranks if as_of == 3 else 1)
    assert (held[G], held[M], held[O]) == (2 * P // ranks, 4 * P // ranks, 8 * P // ranks)


@pytest.mark.parametrize("stage", [1, 2])
def test_deepspeed_frees_the_gradients_of_one_group_before_its_update(stage: int) -> None:
    """Its fp32 gradients are left. Before the update the 16-bit ones are there twice: whole tensors, and flattened.

    stage_1_and_2.py, step: averaged_gradients. Of 4 ranks the first has 28,608 elements: both embeddings, a norm, the
    attention and a norm are 25,088, so the 16,384 of the next matrix are there, too.
    """
    words = (f"zero_stage={stage}", "data_parallel=4", "engine=deepspeed", "optimizer_implementation=fused")
    rows = ledger("mixed-16", *words).live_rows("optimizer_step_2")
    touched = V * D + S * D + 2 * D + 3 * (D + 1) * D + (D + 1) * D + 2 * D + 4 * D**2

    assert all(row.tensor.endswith("in fp32") for row in rows if row.component is G)
    both = next(row for row in rows if row.tensor == "gradients, also flattened, beyond the update")
    assert both.bytes == 2 * (touched + P // 4)


def test_deepspeed_frees_gradients_at_the_end_of_its_step_and_stage_3_keeps_their_buffer() -> None:
    """Nothing at zero_grad below stage 3; there a flat buffer of the rank's share, 2P/N bytes, from the start."""
    for stage, kept in ((1, 0), (2, 0), (3, 2 * P // 4)):
        run = ledger("mixed-16", f"zero_stage={stage}", "data_parallel=4", "engine=deepspeed")
        assert run.components("zero_grad_2").get(G, 0) == kept
        assert run.components("optimizer").get(G, 0) == kept


def test_a_share_that_does_not_divide_is_padded() -> None:
    """5 ranks: FSDP2 pads the rows of each tensor (64 to 65), DeepSpeed its elements (64·64 to 4100)."""
    for engine, share in (("fsdp2", 13 * 64), ("deepspeed", 820)):
        run = ledger("mixed-16", "zero_stage=3", "data_parallel=5", f"engine={engine}")
        weights = {(row.module, row.tensor): row.bytes // row.count for row in run.live_rows("model", W)}

        assert weights["layers.*.attention.o_proj", "weight"] == 2 * share


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_tensor_parallel_ranks_hold_the_whole_and_copies_of_what_is_not_split(ranks: int) -> None:
    """Matrices 12 d² and the biases of qkv and up (7 d) and both V d split; 6 d a layer, S d and 2 d are everywhere."""
    whole = L * (12 * D**2 + 7 * D) + 2 * V * D
    everywhere = L * 6 * D + S * D + 2 * D

    assert whole + everywhere == P
    assert ledger("pure", f"tensor_parallel={ranks}").components("model")[W] == 2 * (whole // ranks + everywhere)


def test_pipeline_stages_hold_every_parameter_once() -> None:
    """Untied: the first stage has both embeddings, the last the final norm and the head."""
    run = memcalc.estimate({"model": MODEL, "training": {"recipe": "pure"}}, "pipeline_parallel=2")
    held = {rank.rank["pipeline_stage"]: rank.ledger.components("model")[W] for rank in run.ranks}

    assert held == {0: 2 * (LAYER + V * D + S * D), 1: 2 * (LAYER + V * D + 2 * D)}
    assert sum(held.values()) == 2 * P


def test_the_ledgers_parameters_are_those_of_the_table() -> None:
    run = ledger("pure")
    spec = memcalc.estimate({"model": MODEL}).spec.model
    named = {f"{row.module}.{row.tensor}" for row in run.live_rows("model", W)}

    assert named == {
        f"{row.module}.{row.tensor}"
        for row in parameter_table(spec.model_copy(update={"fused_qkv": True}))  # plain modules fuse q, k and v
    }
