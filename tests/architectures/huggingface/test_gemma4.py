"""What layers of Gemma 4 keep for backward, term by term: other heads in full attention, experts and an MLP.

Pure bf16 without dropout, as in test_dense_layers: a bf16 element is 2 bytes, an fp32 one 4.
"""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.architectures.catalogue import GradientPolicy, program
from memcalc.architectures.structure import block_structure
from memcalc.catalogue.shipped import find_shipped, search_shipped
from memcalc.errors import InputError
from memcalc.layout.parameters import count_parameters, parameter_table, prefix_of
from memcalc.layout.stages import layer_modules
from memcalc.ledger.component import Component
from memcalc.report.screens.listings import published_rows
from memcalc.spec.model_families.conversion import has_family_formulas, read_hf_config

B, S, D, F, V = 2, 32, 64, 96, 100
H, KV, HEAD = 4, 2, 16
FULL_KV, FULL_HEAD = 2, 264  # flash attention has no kernel for heads above 256
E, K, F_E = 4, 2, 24
TOKENS, COPIES = B * S, B * S * K
FULL: dict[str, Any] = {"head_dim": FULL_HEAD, "num_key_value_heads": FULL_KV, "keys_as_values": True}
MOE: dict[str, Any] = {
    "num_experts": E,
    "num_experts_per_token": K,
    "expert_intermediate_size": F_E,
    "dense_mlp": True,
}


def normed(rows: int, width: int) -> int:
    """fp32 input, normed in fp32, the mean of squares and its power of each row.

    The output belongs to the operator that reads it. The weight in fp32, where there is one, is a temporary.
    """
    return 8 * rows * width + 8 * rows


GATED = 8 * TOKENS * F + 2 * TOKENS * D  # gate 2, gelu 2, up 2, product 2; its input
LAYER = 4 * normed(TOKENS, D) + 2 * TOKENS * D  # norms before and after both branches; the input of attention


def attention(heads: int, groups: int, head: int, *, repeated: bool) -> int:
    """Norms of heads of q, k and v, the last without a weight; the tensors that the kernel saves."""
    norms = normed(TOKENS * heads, head) + normed(TOKENS * groups, head) + normed(TOKENS * groups, head)
    norms -= 4 * TOKENS * groups * head  # v's product with the power is a temporary, since there is no weight
    kernel = 2 * TOKENS * head * (heads + 2 * (heads if repeated else groups))  # q, k and v
    return norms + kernel + 2 * TOKENS * heads * head + 4 * TOKENS * heads  # attention's output, log-sum-exps


WINDOW_LAYER = LAYER + attention(H, KV, HEAD, repeated=False) + GATED
FULL_LAYER = LAYER + attention(H, FULL_KV, FULL_HEAD, repeated=True) + GATED


def run(kinds: str, moe: dict[str, Any] | None = None, **training: object) -> dict[str, Any]:
    """A model of these layers: "w" for a window, "f" for full attention."""
    model = {
        "architecture": "gemma4_text",
        "num_layers": len(kinds),
        "hidden_size": D,
        "num_attention_heads": H,
        "num_key_value_heads": KV,
        "head_dim": HEAD,
        "intermediate_size": F,
        "vocab_size": V,
        "full_attention_interval": 0,
        "full_attention_layers": [layer for layer, kind in enumerate(kinds) if kind == "f"],
        "full_attention": FULL,
        "moe": moe,
    }
    settings = {"implementation": "huggingface", "recipe": "pure", "attention": "flash", "b": B, "s": S}
    return {"model": model, "training": settings | training}


def kept(kinds: str, **options: Any) -> int:
    return memcalc.estimate(run(kinds, **options)).ledger.components("loss_1")[Component.ACTIVATIONS]


def test_a_layer_with_a_window_keeps() -> None:
    assert kept("wwwf") - kept("wwf") == WINDOW_LAYER


def test_a_layer_with_full_attention_keeps_keys_and_values_of_every_query_head() -> None:
    assert kept("wfff") - kept("wff") == FULL_LAYER


def test_parameters_by_hand() -> None:
    """Projections of queries and outputs, of keys (and of values in windows); norms; MLP; two embeddings in one.

    26B-A4B: 2,816 to 16 heads of 256 or 512, 8 or 2 key heads; 128 experts of 704 and a router with its two scales.
    """
    window = 2 * D * H * HEAD + 2 * D * KV * HEAD + 2 * HEAD + 4 * D + 3 * D * F
    full = 2 * D * H * FULL_HEAD + D * FULL_KV * FULL_HEAD + 2 * FULL_HEAD + 4 * D + 3 * D * F
    experts = E * D + D + E + 3 * D + 3 * E * D * F_E

    def parameters(kinds: str, moe: dict[str, Any] | None = None) -> int:
        return count_parameters(memcalc.load(run(kinds, moe)).model)

    assert parameters("wwf") == 2 * window + full + D + V * D
    assert parameters("wwf", MOE) == 2 * window + full + 3 * experts + D + V * D


def test_experts_add_to_the_mlp() -> None:
    """Three norms more; a router with a norm without a weight; experts as in test_experts."""
    router = (
        normed(TOKENS, D)
        - 4 * TOKENS * D  # without a weight
        + 2 * TOKENS * D  # normed, for the gradient of the router's scale
        + 2 * TOKENS * D  # scaled, for the gradient of its weight
        + 4 * TOKENS * E  # probabilities
        + 4 * COPIES  # the best of them before the division
        + 4 * TOKENS  # their sum
        + 4 * COPIES  # divided, for the gradient of each expert's scale
        + 2 * COPIES  # that scale of each copy
    )
    experts = (
        4 * 8 * COPIES  # which experts, the order of copies, their tokens, and the order back
        + 4 * E  # where groups end
        + 4 * COPIES  # weights by expert
        + 2 * COPIES * (D + 2 * F_E + F_E + F_E + D)  # tokens, gate and up, gelu, product, outputs
    )

    assert kept("wwf", moe=MOE) - kept("wwf") == 3 * (3 * normed(TOKENS, D) + router + experts)


@pytest.mark.parametrize("layer", [0, 2], ids=["window", "full"])
def test_every_parameter_gets_its_gradient(layer: int) -> None:
    """Those of the parameter table: in layers with full attention, one projection makes keys and values."""
    spec = memcalc.load(run("wwf", MOE))
    structure = block_structure(spec).of_layers(layer_modules(spec, layer))
    block = program(structure, "expert layer", False, GradientPolicy(True, None))
    made = {block.storages[event.storage].parameter for event in block.backward if event.sign > 0}
    prefix = f"{prefix_of(spec.model, layer)}*."
    named = {f"{row.module}.{row.tensor}" for row in parameter_table(spec.model) if row.module.startswith(prefix)}

    assert {name.removeprefix(prefix) for name in named} == made - {""}


def test_recomputed_layers_keep_their_inputs() -> None:
    assert kept("wwf", recompute="full") - kept("wf", recompute="full") == 2 * TOKENS * D


@pytest.mark.parametrize("implementation", ["plain", "megatron"])
def test_other_modules_are_refused(implementation: str) -> None:
    with pytest.raises(InputError, match=r"other heads in full attention\. Set implementation: huggingface"):
        memcalc.estimate(run("wf", implementation=implementation))


def test_generation_is_refused() -> None:
    with pytest.raises(InputError, match="generation of a model with other heads in full attention is not modelled"):
        memcalc.estimate({"model": run("wf")["model"], "inference": {"prompt_length": 10, "new_tokens": 1}})


def test_completions_are_refused() -> None:
    with pytest.raises(InputError, match="generation of a model with separate heads in full attention is not modelled"):
        memcalc.estimate(run("wf"), "completion_length=16")


def test_images_in_short_sequences_are_a_limit() -> None:
    """A window of 1,024 tokens has a mask from 1,024 tokens on anyway."""
    limits = {
        length: [limit.feature for limit in memcalc.estimate("google/gemma-4-26B-A4B", f"s={length}").limits]
        for length in (512, 1024)
    }

    assert {length: any("batches with images" in each for each in found) for length, found in limits.items()} == {
        512: True,
        1024: False,
    }


def test_a_saved_config_has_the_heads_of_each_layer_with_full_attention() -> None:
    """transformers 5.23 writes per_layer_config in place of global_head_dim."""
    published = find_shipped("google/gemma-4-31B-it")
    assert published is not None
    text = dict(published.config["text_config"])
    full = {"head_dim": text.pop("global_head_dim"), "num_key_value_heads": text.pop("num_global_key_value_heads")}
    layers = [layer for layer, word in enumerate(text["layer_types"]) if word == "full_attention"]

    read = read_hf_config(text | {"per_layer_config": {str(layer): full for layer in layers}}, "config.json")

    assert read["full_attention"] == full | {"keys_as_values": True}


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size_per_layer_input": 256},
        {"num_kv_shared_layers": 10},
        {"layer_types": ["full_attention", *["sliding_attention"] * 59]},
        {"layer_types": None},
        {"final_logit_softcapping": None},
        {"per_layer_config": {"0": {"head_dim": 512}}},
    ],
    ids=str,
)
def test_other_variants_have_no_formulas(change: dict[str, Any]) -> None:
    published = find_shipped("google/gemma-4-31B-it")
    assert published is not None

    assert has_family_formulas(published.config["text_config"])
    assert not has_family_formulas(published.config["text_config"] | change)


def test_models_with_per_layer_inputs_are_listed_as_traced() -> None:
    rows = {row["hub_id"]: row["answered_by"] for row in published_rows(search_shipped("google gemma-4"))}

    assert rows["google/gemma-4-26B-A4B"] == rows["google/gemma-4-31B-it"] == "formulas"
    assert rows["google/gemma-4-E2B"] == rows["google/gemma-4-E4B-it"] == "trace"


def test_key_heads_of_full_attention_divide_query_heads() -> None:
    with pytest.raises(InputError, match=r"full_attention\.num_key_value_heads = 3 does not divide"):
        memcalc.estimate(run("wf"), "full_attention.num_key_value_heads=3")
