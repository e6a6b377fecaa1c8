"""Each choice moves what it concerns by the amount that theory says, on runs of any size, and nothing else.

P parameters, l layers, h heads, b micro-batch, s sequence, N data-parallel ranks, m micro-batches, p stages.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.api import estimate, load
from memcalc.layout.local_parameters import stage_parameters
from memcalc.layout.stages import stages_of
from memcalc.ledger.component import Component
from memcalc.ledger.row import Row
from memcalc.ledger.textbook import zero_model_state_bytes
from memcalc.simulation import step_recorder
from memcalc.simulation.layer_loops import LayerLoop
from tests.properties.specs import (
    TWO_GROUPS,
    Config,
    by_stage,
    changes_of,
    configs,
    examples,
    gpt,
    gpts,
    held,
    states,
    totals,
)

ACTIVATIONS, GRADIENTS = Component.ACTIVATIONS, Component.GRADIENTS
WEIGHT_BYTES = {"fp32": 4, "amp": 4}  # 2 in every other recipe at bf16


# -- attention and recomputation ---------------------------------------------------------------------------------------


@examples(30)
@given(gpts(), st.sampled_from([0.0, 0.1]))
def test_flash_attention_trades_the_maps_for_one_number_a_row(
    case: tuple[Config, int, dict[str, int]], dropout: float
) -> None:
    """Per layer: softmax output 2bs²h, dropout mask bs²h and output 2bs²h go; fp32 log-sum-exps 4bhs come."""
    config, _, n = case
    config["model"]["d"] = 8 * n["h"]  # narrower heads would be padded to that
    maps = (5 if dropout else 2) * n["b"] * n["s"] ** 2 * n["h"]
    log_sum_exps = 4 * n["b"] * n["h"] * n["s"]
    eager, flash = (estimate(config, f"dropout={dropout}", f"attention={kind}") for kind in ("eager", "flash"))

    assert held(eager, "loss_1", ACTIVATIONS) - held(flash, "loss_1", ACTIVATIONS) == n["l"] * (maps - log_sum_exps)
    for phase in ("model", "optimizer", "input", "optimizer_step_1", "zero_grad_2", "optimizer_step_2"):
        assert changes_of(eager, flash, phase) == {}


@examples(30)
@given(gpts(), st.integers(1, 7))
def test_each_recomputed_layer_keeps_its_input_alone(case: tuple[Config, int, dict[str, int]], k: int) -> None:
    """every-k recomputes floor(l / k) layers: each of these keeps 2bsd, the others what they keep without a plan."""
    config, _, n = case
    layer, rest = divmod(held(estimate(config), "loss_1", ACTIVATIONS), n["l"])
    again = n["l"] // k
    planned = held(estimate(config, f"recompute=every-{k}"), "loss_1", ACTIVATIONS)

    assert rest == 0
    assert planned == (n["l"] - again) * layer + again * 2 * n["b"] * n["s"] * n["d"]


@examples(30)
@given(gpts(attention="eager", dropout=0.1))
def test_selective_recomputation_drops_5_b_s2_h_a_layer(case: tuple[Config, int, dict[str, int]]) -> None:
    """Korthikanti et al. (arXiv 2205.05198) section 5: what the attention core keeps, and nothing else."""
    config, _, n = case
    maps = n["l"] * 5 * n["b"] * n["s"] ** 2 * n["h"]

    assert changes_of(estimate(config), estimate(config, "recompute=selective"), "loss_1") == {ACTIVATIONS: -maps}


@examples(40)
@given(configs())
def test_recomputation_leaves_model_states_and_logits_alone(config: Config) -> None:
    """A plan concerns what layers keep between forward and backward: in the optimizer's phases nothing changes."""
    none, full = (by_stage(estimate(config, f"recompute={plan}")) for plan in ("none", "full"))
    for stage, rank in none.items():
        for phase in ("model", "optimizer", "input", "optimizer_step_1", "zero_grad_2", "optimizer_step_2"):
            assert rank.ledger.components(phase) == full[stage].ledger.components(phase)
        logits = Component.LOGITS_AND_LOSS
        assert rank.ledger.components("loss_1").get(logits) == full[stage].ledger.components("loss_1").get(logits)


@examples(60)
@given(configs(layers=16, pipeline=False), st.lists(st.booleans(), min_size=16, max_size=16) | st.integers(1, 5))
def test_loops_of_layers_are_the_layers_one_by_one(config: Config, plan: list[bool] | int) -> None:
    """Equal rounds of layers are recorded once and summed in closed form: as if every layer were recorded."""
    layers = config["model"]["num_layers"]
    if isinstance(plan, int):
        config["training"]["recompute"] = f"every-{plan}"
    else:
        config["training"]["recompute"] = [layer for layer in range(layers) if plan[layer]]
    found = totals(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_recorder, "loops_of", lambda _, plan: (LayerLoop(plan),))
        exhaustive = totals(config)

    assert found == exhaustive


# -- gradients ---------------------------------------------------------------------------------------------------------


@examples(30)
@given(gpts(), st.sampled_from(["fp32", "amp", "pure", "mixed-16", "mixed-18", "mixed-20"]))
def test_accumulation_keeps_whole_gradients_through_forward(
    case: tuple[Config, int, dict[str, int]], recipe: str
) -> None:
    """From the second micro-batch on, forward finds the gradients of those before: autograd's, and mixed-20's fp32 copy.

    mixed-18's main gradients are always there, and mixed-16 makes its fp32 gradients in the step.
    """
    config, parameters, _ = case
    dtype = "fp32" if recipe == "fp32" else "bf16"
    once, twice = (
        estimate(config, f"recipe={recipe}", f"dtype={dtype}", f"gradient_accumulation_steps={m}") for m in (1, 2)
    )
    gradient_bytes = {"fp32": 4, "amp": 4, "pure": 2, "mixed-16": 2, "mixed-18": 0, "mixed-20": 2 + 4}[recipe]
    gained = {GRADIENTS: gradient_bytes * parameters} if gradient_bytes else {}

    workspace = {Component.LIBRARY_WORKSPACE: (2 * 4096 + 8 * 16) * 1024}  # the first backward's thread has made it
    for phase in ("forward_1", "loss_1", "forward_2", "loss_2"):
        assert changes_of(once, twice, phase) == gained | (workspace if phase.endswith("_1") else {})
    for phase in ("model", "optimizer", "optimizer_step_1", "zero_grad_2", "optimizer_step_2"):
        assert changes_of(once, twice, phase) == {}


@examples(30)
@given(gpts(), st.sampled_from(["fp32", "amp", "pure", "mixed-16", "mixed-18", "mixed-20"]))
def test_gradients_filled_with_zeros_live_through_the_second_forward(
    case: tuple[Config, int, dict[str, int]], recipe: str
) -> None:
    """zero_grad: zero keeps what set_to_none frees, from the second step on; in the first there is nothing to keep."""
    config, parameters, _ = case
    dtype = "fp32" if recipe == "fp32" else "bf16"
    freed, zeroed = (
        estimate(config, f"recipe={recipe}", f"dtype={dtype}", f"zero_grad={how}") for how in ("set_to_none", "zero")
    )
    gradient_bytes = {"fp32": 4, "amp": 4, "pure": 2, "mixed-16": 2, "mixed-18": 0, "mixed-20": 2 + 4}[recipe]
    gained = {GRADIENTS: gradient_bytes * parameters} if gradient_bytes else {}

    for phase in ("forward_1", "loss_1", "backward_1", "zero_grad_2", "optimizer_step_2"):
        assert changes_of(freed, zeroed, phase) == {}
    for phase in ("forward_2", "loss_2"):
        assert changes_of(freed, zeroed, phase) == gained


def made_in_step(row: Row) -> bool:
    """Whether a gradient is there while the optimizer steps, and at no other time: its copy in fp32."""
    return all(phase.startswith("optimizer_step") for phase in row.phases)


@examples(60)
@given(configs(layers=12, pipeline=False), st.integers(2, 3))
def test_gradients_in_backward_are_at_most_the_whole_ones_and_those_of_one_block(config: Config, m: int) -> None:
    """With accumulation, backward adds each block's gradients to those there are: never two whole sets, sharded or not.

    While a block is computed (a layer, the embedding or the head), its gradients stand there once more; those of the
    root (embedding and head) until the end of backward under FSDP2.
    """
    result = estimate(config, f"gradient_accumulation_steps={m}")
    spec = result.spec
    (stage,) = stages_of(spec)
    blocks: dict[str, int] = {}
    for row in stage_parameters(spec, stage):
        part = row.module.partition("*")[0] if row.where == "layer" else "root"
        blocks[part] = blocks.get(part, 0) + row.elements
    item = 4 if spec.training.dtype == "fp32" else WEIGHT_BYTES.get(spec.training.recipe, 2)
    # Those that wait for the next micro-batch are there through its forward, too.
    rows = result.headline.ledger.rows
    whole = sum(row.bytes for row in rows if row.component is GRADIENTS and "forward_2" in row.phases)

    for phase in ("backward_1", "backward_2"):
        assert whole <= held(result, phase, GRADIENTS) <= whole + item * sum(blocks.values())


# -- sharding ----------------------------------------------------------------------------------------------------------


@examples(30)
@given(gpts(recipe="mixed-16"), st.sampled_from([2, 4]), st.integers(0, 3))
def test_zero_shards_as_its_paper_says(case: tuple[Config, int, dict[str, int]], ranks: int, stage: int) -> None:
    """ZeRO (arXiv 1910.02054) figure 1, in the second step: 16P, 4P + 12P/N, 2P + 14P/N, 16P/N.

    Every size here is a multiple of 4, so every tensor divides. The fp32 gradients made for the step are not counted,
    and DeepSpeed's stage 1 frees reduced gradients as its stage 2 does. With a group of parameters without weight decay
    16-bit gradients are there until its update, the last one.
    """
    config, parameters, _ = case
    config["parallelism"] = {"engine": "deepspeed", "zero_stage": stage, "data_parallel": ranks, **TWO_GROUPS}
    rows = states(estimate(config).headline).values()
    found = sum(row.bytes for row in rows if not row.tensor.endswith("gradient in fp32"))

    assert found == zero_model_state_bytes(parameters, ranks, 2 if stage == 1 else stage)


@examples(40)
@given(configs(data=False, tensor=False), st.integers(1, 8))
def test_1f1b_keeps_min_m_and_p_minus_i_micro_batches(config: Config, m: int) -> None:
    """Stage i holds the activations of min(m, p - i) micro-batches (arXiv 2104.04473 section 2.2), each alike."""
    p = config["parallelism"]["pipeline_parallel"]
    alone = by_stage(estimate(config, "gradient_accumulation_steps=1"))
    filled = by_stage(estimate(config, f"gradient_accumulation_steps={m}"))

    for stage, rank in filled.items():
        one = alone[stage].ledger.components("loss_1").get(ACTIVATIONS, 0)
        assert rank.ledger.components("loss_1").get(ACTIVATIONS, 0) == min(m, p - stage) * one


def test_fsdp2_keeps_the_gradients_of_its_root_whole_until_the_end() -> None:
    """Both tables, V x d each, and the final norm are one unit: reduced when the embedding's backward has passed.

    2 bytes each of 2Vd + 2d elements, and what the layers have left: shares of (12d² + 13d) / N elements.
    """
    config, _ = gpt(3, 64, 4, 4096, s=8, recipe="pure")
    config["model"]["tie_word_embeddings"] = False
    root = 2 * (2 * 4096 * 64 + 2 * 64)
    shares = 3 * 2 * (12 * 64**2 + 13 * 64) // 4
    result = estimate(config, "zero_stage=3", "data_parallel=4")

    assert held(result, "backward_1", GRADIENTS) == root + shares


@examples(30)
@given(configs(data=False, tensor=False), st.integers(2, 8))
def test_the_casts_of_autocast_are_those_of_one_micro_batch(config: Config, m: int) -> None:
    """The cache goes with the autocast region: micro-batches that wait for their backward keep what autograd saved."""
    config["training"] |= {"recipe": "amp", "dtype": "bf16", "gradient_dtype": None}
    spec = load(config, f"gradient_accumulation_steps={m}")
    ranks = by_stage(estimate(spec))
    for stage in stages_of(spec):
        for phase in ("forward_1", "loss_1"):
            for row in ranks[stage.index].ledger.live_rows(phase):
                if row.tensor.endswith("bias in bf16 (autocast cache)"):  # no gradient needs a bias
                    assert row.count <= stage.stop - stage.first


@examples(40)
@given(configs(tensor=False, pipeline=False), st.integers(2, 5))
def test_ddp_holds_a_second_copy_of_the_gradients_in_buckets(config: Config, ranks: int) -> None:
    """Buckets as large as autograd's gradients, from construction on.

    Of mixed-18, which frees gradients at once, the end of backward has them again: DDP allocates what it has reduced.
    """
    config["parallelism"] |= {"engine": "ddp", "zero_stage": 0}
    one, many = (estimate(config, f"data_parallel={n}") for n in (1, ranks))
    spec = one.spec
    item = 4 if spec.training.dtype == "fp32" else WEIGHT_BYTES.get(spec.training.recipe, 2)
    (stage,) = stages_of(spec)
    elements = sum(row.count * row.elements for row in stage_parameters(spec, stage))
    buckets = {Component.COMMUNICATION_BUFFERS: item * elements}

    assert changes_of(one, many, "model") == {}
    for phase in one.ledger.phases[1:]:
        if spec.training.recipe == "mixed-18" and phase.startswith("backward"):
            assert item * elements <= sum(changes_of(one, many, phase).values()) <= 2 * item * elements
        else:
            assert changes_of(one, many, phase) == buckets
