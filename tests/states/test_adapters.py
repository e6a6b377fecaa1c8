"""LoRA and QLoRA in the estimate: what trains, what is held, and what autograd keeps where weights are frozen."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.ledger.component import Component
from memcalc.ledger.ledger import Ledger

# A LLaMA of 3 layers with as many heads of keys as of queries, of 2 sequences of 32 tokens.
L, D, H, F, V, B, S, R = 3, 64, 4, 96, 128, 2, 32, 4
MODEL = {
    "architecture": "llama",
    "l": L,
    "d": D,
    "h": H,
    "num_key_value_heads": H,
    "intermediate_size": F,
    "V": V,
    "tie_word_embeddings": False,
}
BASE = L * (4 * D**2 + 3 * D * F + 2 * D) + 2 * V * D + D
W, G, A = Component.WEIGHTS, Component.GRADIENTS, Component.ACTIVATIONS
STATES = Component.OPTIMIZER_STATE


def result(*overrides: str, **training: Any) -> memcalc.Result:
    return memcalc.estimate({"model": MODEL, "training": {"b": B, "s": S, "finetune": "lora"} | training}, *overrides)


def ledger(*overrides: str, **training: Any) -> Ledger:
    return result("lora.rank=4", *overrides, **training).ledger


# -- what trains -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "rank", "targets", "trainable"),
    [
        ("llama-2-7b", 8, "[q_proj, v_proj]", 4_194_304),
        ("llama-2-7b", 16, "all-linear", 39_976_960),
        ("llama-3-8b", 16, "all-linear", 41_943_040),
    ],
)
@pytest.mark.parametrize("implementation", ["plain", "huggingface"])
def test_adapters_have_the_published_sizes(
    preset: str, rank: int, targets: str, trainable: int, implementation: str
) -> None:
    """r (in + out) each. LLaMA-2-7B, r = 8, q and v: 32 · 2 · 8 · (4096 + 4096)."""
    found = memcalc.estimate(
        preset, f"lora.rank={rank}", f"lora.target_modules={targets}", f"implementation={implementation}"
    )

    assert found.trainable_parameters == trainable
    assert found.parameters == memcalc.estimate(preset).parameters + trainable


def test_what_is_saved_whole_trains_beside_its_frozen_original() -> None:
    found = result("lora.rank=4", "lora.target_modules=[q_proj]", "lora.modules_to_save=[lm_head, embed_tokens]")

    assert found.trainable_parameters == L * R * (D + D) + 2 * V * D
    assert found.ledger.components("model")[W] == 2 * (BASE + 2 * V * D) + 4 * L * R * 2 * D


def test_saved_modules_that_share_a_weight_train_in_two_copies() -> None:
    """PEFT copies each of them, and keeps the shared weight frozen."""
    found = result(
        "lora.rank=4",
        "lora.target_modules=[q_proj]",
        "lora.modules_to_save=[lm_head, embed_tokens]",
        "tie_word_embeddings=true",
    )

    assert found.trainable_parameters == L * R * (D + D) + 2 * V * D
    assert found.ledger.components("model")[W] == 2 * (BASE - V * D + 2 * V * D) + 4 * L * R * 2 * D


@pytest.mark.parametrize("tied", ["true", "false"])
def test_an_adapter_of_the_head(tied: str) -> None:
    """r (d + V) more, beside a tied head, too; all-linear leaves the head out."""
    words = ("lora.rank=4", f"tie_word_embeddings={tied}")
    found = result("lora.target_modules=[q_proj, lm_head]", *words)

    assert found.trainable_parameters == L * R * (D + D) + R * (D + V)
    assert result(*words).trainable_parameters == L * R * (4 * (D + D) + 3 * (D + F))


def test_a_target_without_a_layer_is_ignored_and_reported() -> None:
    """As in PEFT, if another one has a layer."""
    found = result("lora.target_modules=[q_proj, qkv_proj, w1]")

    assert found.trainable_parameters == result("lora.target_modules=[q_proj]").trainable_parameters
    assert (
        "target_modules: no layer of this model is named qkv_proj or w1, so that name adds no adapter." in found.notes
    )


# -- what is held ------------------------------------------------------------------------------------------------------


def test_a_frozen_base_is_two_bytes_a_parameter_and_an_adapter_sixteen() -> None:
    """fp32 adapters: 4 of weights, 4 of gradients, 8 of moments."""
    adapters = L * R * (4 * (D + D) + 3 * (D + F))
    run = ledger()

    assert run.components("model") == {W: 2 * BASE + 4 * adapters, Component.BLOCK_ROUNDING: rounding(run)}
    assert run.components("zero_grad_2")[G] == 4 * adapters
    assert run.components("zero_grad_2")[STATES] == 8 * adapters


def rounding(run: Ledger) -> int:
    return run.components("model")[Component.BLOCK_ROUNDING]


def test_a_mixed_recipe_keeps_masters_of_adapters_alone() -> None:
    """2 of weights and 2 of gradients, 4 of masters, 8 of moments."""
    adapters = L * R * (4 * (D + D) + 3 * (D + F))
    held = ledger(recipe="mixed-16").components("zero_grad_2")

    assert held[W] == 2 * (BASE + adapters)
    assert held[Component.MASTER_WEIGHTS] == 4 * adapters
    assert (held[G], held[STATES]) == (2 * adapters, 8 * adapters)


@pytest.mark.parametrize(
    ("double", "block", "bytes_"),
    [
        # a matrix of 4096 x 4096: n/2, and of n/64 scales a byte each, 4 for 256 of them, their mean, 256 + 16 values
        ("true", 64, 8_388_608 + 262_144 + 4 * 1024 + 4 + 4 * (256 + 16)),
        ("true", 128, 8_388_608 + 131_072 + 4 * 512 + 4 + 4 * (256 + 16)),
        # and with the scales in fp32
        ("false", 64, 8_388_608 + 4 * 262_144 + 4 * 16),
    ],
)
def test_a_matrix_in_4_bits(double: str, block: int, bytes_: int) -> None:
    """0.5159 bytes per element with double quantization, 0.5625 without (QLoRA, arXiv 2305.14314, section 3)."""
    run = memcalc.estimate("llama-2-7b", f"qlora.double_quantization={double}", f"qlora.block_size={block}").ledger
    rows = [row for row in run.live_rows("model", W) if row.module == "layers.*.attention.q_proj"]

    assert sum(row.bytes for row in rows) == 32 * bytes_
    assert bytes_ / 4096**2 == pytest.approx(
        {("true", 64): 0.5159, ("false", 64): 0.5625}.get((double, block), 0.508), abs=1e-3
    )


def test_embedding_norms_and_head_stay_whole() -> None:
    run = ledger(finetune="qlora")
    whole = {row.module: row.bytes for row in run.live_rows("model", W) if row.dtype == "bf16"}

    assert whole == {
        "embed_tokens": 2 * V * D,
        "lm_head": 2 * V * D,
        "norm": 2 * D,
        "layers.*.input_norm": 2 * L * D,
        "layers.*.post_attention_norm": 2 * L * D,
    }


def test_an_untied_head_is_quantized_if_asked_for() -> None:
    run = ledger("qlora.quantize_lm_head=true", finetune="qlora")

    assert [row.bytes for row in run.live_rows("model", W) if row.module == "lm_head" and "4-bit" in row.tensor][
        :1
    ] == [V * D // 2]


# -- what autograd keeps -----------------------------------------------------------------------------------------------


def kept(run: Ledger, module: str) -> dict[str, int]:
    """Bytes of what one layer keeps, by name; of identical layers, each."""
    rows = [row for row in run.live_rows("loss_1", A) if row.module == module]
    return {row.tensor: row.bytes // row.count for row in rows}


def test_a_layer_keeps_no_input_of_a_frozen_matrix() -> None:
    """With an adapter beside q alone, only q's input is kept, in the adapter's fp32, with what A makes of it.

    Norms, activations and attention keep what they need for the gradient of their input. Of frozen matrices backward
    needs the weight alone, so o's input is there as attention's output, and down's is not there at all.
    """
    tokens = B * S
    expected = {
        "layer input": 2 * tokens * D,
        "input_norm reciprocal deviation": 4 * tokens,
        "attention.q_proj input for the adapter": 4 * tokens * D,
        "attention.q_proj.lora_A output": 4 * tokens * R,
        "rotated q": 2 * tokens * D,
        "rotated k": 2 * tokens * D,
        "attention.v_proj output": 2 * tokens * D,
        "attention output": 2 * tokens * D,
        "attention log-sum-exp": 4 * tokens * H,
        "attention sum": 2 * tokens * D,
        "post_attention_norm reciprocal deviation": 4 * tokens,
        "mlp.gate_proj output": 2 * tokens * F,
        "mlp.silu": 2 * tokens * F,
        "mlp.up_proj output": 2 * tokens * F,
    }

    assert kept(ledger("lora.target_modules=[q_proj]"), "layers.*") == expected


def test_each_adapter_casts_its_input_for_itself() -> None:
    """q, k and v read one tensor, and PEFT casts it three times."""
    inputs = [name for name in kept(ledger(), "layers.*") if name.endswith("input for the adapter")]

    assert len(inputs) == 7


def test_adapters_in_the_compute_dtype_cast_nothing() -> None:
    run = ledger("lora.adapter_dtype=compute")

    assert not [name for name in kept(run, "layers.*") if "for the adapter" in name]
    assert kept(run, "layers.*")["input_norm output"] == 2 * B * S * D


def test_adapters_in_bf16_of_a_step_in_fp32() -> None:
    """As TRL's, above a 4-bit base: each adapter casts its input to bf16, and its states are in bf16."""
    run = ledger("lora.adapter_dtype=bf16", "recipe=fp32")
    made = [row for row in run.rows if "lora" in row.tensor and row.component in ("weights", "gradients")]

    assert {row.dtype for row in made} == {"bf16"}
    assert kept(run, "layers.*")["attention.q_proj input for the adapter"] == 2 * B * S * D


def test_the_first_layer_keeps_nothing_before_its_first_adapter() -> None:
    """The embedding is frozen, so no gradient is needed there: attention runs as in inference."""
    run = ledger("lora.target_modules=[down_proj]")

    assert kept(run, "layers.0.*") == {
        "mlp.down_proj input for the adapter": 4 * B * S * F,
        "mlp.down_proj.lora_A output": 4 * B * S * R,
    }
    assert "rotated q" in kept(run, "layers.*")


def test_with_an_input_that_needs_a_gradient_all_layers_are_alike() -> None:
    run = ledger("lora.input_require_grads=true")

    assert not kept(run, "layers.0.*")
    assert any(row.count == L for row in run.live_rows("loss_1", A) if row.module == "layers.*")


def test_adapter_dropout_keeps_its_mask_and_its_output() -> None:
    names = kept(ledger("lora.dropout=0.1", "lora.target_modules=[q_proj]"), "layers.*")

    assert names["attention.q_proj adapter dropout mask"] == B * S * D
    assert names["attention.q_proj adapter dropout output"] == 4 * B * S * D
    assert "attention.q_proj input for the adapter" not in names


def test_a_frozen_weight_is_cast_at_each_use_and_its_cast_is_kept_for_the_gradient_of_the_input() -> None:
    """Autocast caches casts of leaves that need a gradient only (ATen autocast_mode.cpp, cached_cast)."""
    names = kept(ledger("lora.target_modules=[q_proj]", recipe="amp"), "layers.*")

    assert names["attention.k_proj.weight in bf16"] == 2 * D * D
    assert names["mlp.down_proj.weight in bf16"] == 2 * D * F


def test_a_matrix_in_4_bits_is_whole_for_a_moment_in_forward_and_in_backward() -> None:
    """2 bytes per element. One layer, and few tokens: the largest matrix is what makes the moment."""
    wide = 64 * F
    sizes = ("l=1", "b=1", "s=5", "V=2", f"intermediate_size={wide}")
    run = result(*sizes, "lora.rank=1", "lora.target_modules=[q_proj]", finetune="qlora").ledger
    for phase in ("forward_1", "backward_1"):
        whole = [row for row in run.live_rows(phase) if "dequantized" in row.tensor]
        assert [row.bytes for row in whole] == [2 * D * wide]


def test_frozen_parameters_get_no_gradients() -> None:
    rows = ledger().live_rows("optimizer_step_2", G)

    assert sum(row.count for row in rows) == 2 * 7 * L
    assert all(".lora_" in row.module for row in rows)


@pytest.mark.parametrize(("recompute", "held"), [("[1]", True), ("[0]", False), ("none", False)])
def test_an_embedding_that_needs_a_gradient_stays_where_no_layer_keeps_it(recompute: str, held: bool) -> None:
    """PEFT makes it a leaf for checkpointing: 2·b·s·d that the first layer's own norm has only read."""
    run = ("llama-3.2-1b", "implementation=huggingface", "recipe=pure", "b=2", "s=256", "num_layers=3", "lora.rank=8")
    rows = memcalc.estimate(*run, f"recompute={recompute}").ledger.rows
    kept = [row.bytes for row in rows if row.tensor == "embed_tokens output" and "loss_1" in row.phases]

    assert kept == ([2 * 2 * 256 * 2048] if held else [])
