"""FSDP2's mixed-precision policy, the ends as units, and gradients that accumulate unsharded: arithmetic."""

from __future__ import annotations

from math import prod

import pytest

import memcalc
from memcalc.ledger.component import Component
from memcalc.ledger.ledger import Ledger
from tests.sharding.small_model import RANKS, VOCAB, WIDTH, sizes

LAYERS = 3
SIZES = (*sizes(LAYERS), "engine=fsdp2")
LAYER = 16 * WIDTH**2 + 2 * WIDTH  # q, k, v, o; gate, up, down of 4d; two norms
TABLE, TAIL = VOCAB * WIDTH, VOCAB * WIDTH + WIDTH  # the embedding; LM head and final norm
PARAMETERS = LAYERS * LAYER + TABLE + TAIL
STATES = (Component.WEIGHTS, Component.MASTER_WEIGHTS, Component.GRADIENTS, Component.OPTIMIZER_STATE)
BF16, FP32 = "fsdp.param_dtype=bf16", "fsdp.reduce_dtype=fp32"
ENDS, LAST = "fsdp.wrap=layers-and-ends", "fsdp.gradient_sync=last"


def run(*words: str) -> Ledger:
    return memcalc.estimate("llama-3.2-1b", *SIZES, "zero_stage=3", *words).ledger


def of(ledger: Ledger, component: Component, phase: str) -> int:
    return sum(row.bytes for row in ledger.rows if row.component is component and phase in row.phases)


def buffers(ledger: Ledger, phase: str = "backward_2") -> dict[str, tuple[int, str]]:
    """Elements and dtypes of the engine's buffers at the highest point of a phase."""
    rows = [row for row in ledger.rows if row.component is Component.COMMUNICATION_BUFFERS and phase in row.phases]
    return {row.tensor: (prod(row.shape), row.dtype) for row in rows}


@pytest.mark.parametrize(
    ("words", "stays"),
    [
        ((), True),
        (("fsdp.reshard_root=true",), False),
        (("fsdp.reshard_root=true", "torch_version=v2.7"), True),
    ],
)
def test_a_resharded_root_is_gathered_again_for_backward(words: tuple[str, ...], stays: bool) -> None:
    """torch from 2.8 on, _fully_shard.py: an explicit reshard_after_forward=True holds for the root, too."""
    ledger, root = run(*words), "root parameters, gathered"

    assert (root in buffers(ledger, "loss_2")) is stays
    assert buffers(ledger, "backward_2")[root][0] == TABLE + TAIL


@pytest.mark.parametrize("implementation", ["plain", "huggingface"])
@pytest.mark.parametrize("recipe", ["fp32", "amp"])
def test_at_rest_a_parameter_has_16_bytes(implementation: str, recipe: str) -> None:
    """fp32 shards, their gradients and two moments: 4 + 4 + 8 bytes; no copy in bf16."""
    ledger = run(BF16, f"recipe={recipe}", f"implementation={implementation}")

    shard = PARAMETERS // RANKS
    buffers = 2 * 4 * 64 // 2 if implementation == "huggingface" else 0  # inverse frequencies, and a copy of these
    found = {each: of(ledger, each, "optimizer_step_2") for each in STATES}
    counters = 4 * sum(row.count for row in ledger.rows if row.tensor.endswith("step counter"))
    assert found == dict(zip(STATES, (4 * shard + buffers, 0, 4 * shard, 8 * shard + counters), strict=True))


def test_a_policy_has_modules_compute_in_its_dtype_on_fp32_shards() -> None:
    training = memcalc.load("llama-3.2-1b", *SIZES, "zero_stage=3", BF16).training

    assert (training.dtype, training.recipe, training.attention) == ("bf16", "fp32", "flash")


def test_shards_of_gradients_keep_the_dtype_of_the_parameters() -> None:
    """Reduced in bf16, cast to fp32 (_fsdp_collectives.py, _to_dtype_if_needed)."""
    assert of(run(BF16), Component.GRADIENTS, "optimizer_step_1") == 4 * PARAMETERS // RANKS


def test_ends_that_are_units_are_not_gathered_together() -> None:
    """In the loss the root has both matrices; as units the head's alone is there."""
    root, apart = buffers(run(BF16), "loss_2"), buffers(run(BF16, ENDS), "loss_2")

    assert root["root parameters, gathered"] == (TABLE + TAIL, "bf16")
    assert apart == {"final norm and head, gathered": (TAIL, "bf16")}


def test_tied_ends_are_one_unit_as_the_root_is() -> None:
    tied = ("tie_word_embeddings=true", BF16)

    assert run(*tied, ENDS).totals == run(*tied).totals


def test_the_heads_gradients_leave_before_the_layers_backward() -> None:
    """What stays of them in the first layer's backward is their fp32 shard."""
    ledger = run(BF16, FP32, ENDS, "recompute=full", "b=16", "s=512", "vocab_size=1024")
    rows = [row for row in ledger.rows if "backward_2" in row.phases]

    assert not [row for row in rows if row.tensor == "lm_head.weight" and row.component is Component.GRADIENTS]
    share = next(row for row in rows if row.tensor == "gradient shard of final norm and head")
    assert share.bytes == 4 * -(-(1024 * WIDTH + WIDTH) // RANKS)


@pytest.mark.parametrize(("reduce", "item_bytes"), [((), 2), ((FP32,), 4)])
def test_gradients_accumulate_unsharded_in_the_reduce_dtype(reduce: tuple[str, ...], item_bytes: int) -> None:
    """`no_sync`: the whole model's, from the first micro-batch to the last; then a rank has fp32 shards."""
    ledger = run(BF16, *reduce, LAST, "gradient_accumulation_steps=4")

    assert of(ledger, Component.GRADIENTS, "loss_2") == item_bytes * PARAMETERS
    assert of(ledger, Component.GRADIENTS, "optimizer_step_2") == 4 * PARAMETERS // RANKS
    each = run(BF16, *reduce, "gradient_accumulation_steps=4")
    assert of(each, Component.GRADIENTS, "loss_2") == 4 * PARAMETERS // RANKS


def test_one_micro_batch_accumulates_nothing() -> None:
    assert run(BF16, LAST).totals == run(BF16).totals


def test_adapters_are_sharded_in_fp32_and_computed_with_in_the_policys_dtype() -> None:
    """Two adapters of rank 8 at d x d in each layer: 2·(8·d + d·8) elements."""
    lora = ("finetune=lora", "target_modules=[q_proj, v_proj]", "lora.base_dtype=compute")
    ledger = run(BF16, *lora)

    adapters = LAYERS * 2 * 2 * 8 * WIDTH
    weights = of(ledger, Component.WEIGHTS, "zero_grad_2")
    assert weights == (4 * adapters + 2 * PARAMETERS) // RANKS
    assert buffers(ledger, "forward_2")["layer parameters, gathered"][1] == "bf16"
