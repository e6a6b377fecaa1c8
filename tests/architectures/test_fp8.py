"""Matmuls in 8 bits: what Transformer Engine keeps beside the weights in 16, by its source."""

from __future__ import annotations

from typing import Any

import pytest

from memcalc.api import estimate, load
from memcalc.errors import InputError
from memcalc.ledger.component import Component
from memcalc.ledger.result import Result

L, D, H, KV, F, V, B, S = 2, 512, 8, 2, 1536, 1024, 2, 256
LLAMA: dict[str, Any] = {
    "l": L,
    "d": D,
    "h": H,
    "num_key_value_heads": KV,
    "intermediate_size": F,
    "V": V,
    "mlp": "swiglu",
    "position_embedding": "rope",
    "normalization": "rmsnorm",
    "tie_word_embeddings": False,
    "qkv_bias": False,
    "output_bias": False,
    "mlp_bias": False,
}
HEAD = D // H
MATRICES = L * ((H + 2 * KV) * HEAD * D + D * D + 3 * D * F)  # qkv, output, gate and up, down
TOKENS = B * S


def run(fp8: str, gpu: str = "h100-80gb", **parallelism: Any) -> Result:
    training = {"implementation": "megatron", "b": B, "s": S, "fp8": fp8}
    return estimate({"model": LLAMA, "training": training, "parallelism": parallelism}, gpu=gpu)


def held(result: Result, component: Component, phase: str = "loss_1", word: str = "") -> int:
    return sum(row.bytes for row in result.ledger.live_rows(phase, component) if word in row.tensor)


@pytest.mark.parametrize(("gpu", "copies"), [("h100-80gb", 2), ("l4", 2), ("b200", 1)])
def test_a_byte_an_element_and_another_for_a_transposed_copy(gpu: str, copies: int) -> None:
    """Hopper and Ada multiply 8 bits in one layout alone; Blackwell in any. Table, head and norms stay in 16 bits."""
    added = held(run("tensorwise", gpu), Component.WEIGHTS) - held(run("none", gpu), Component.WEIGHTS)

    assert added == copies * MATRICES


def test_mxfp8_scales_32_elements_each_way() -> None:
    added = held(run("mxfp8", "b200"), Component.WEIGHTS) - held(run("none", "b200"), Component.WEIGHTS)

    assert added == 2 * (MATRICES + MATRICES // 32)


def test_blocks_of_128_by_128_share_an_fp32_scale() -> None:
    """Sides of 512, 768, 1536 and 3072 are 4, 6, 12 and 24 blocks; the second one in steps of 4. Both ways.

    qkv [768, 512]: 6·4, and 4·8; output [512, 512]: 4·4 twice; gate and up [3072, 512]: 24·4 twice; down [512, 1536]:
    4·12 twice.
    """
    added = held(run("blockwise"), Component.WEIGHTS) - held(run("none"), Component.WEIGHTS)

    scales = L * (6 * 4 + 4 * 8 + 2 * 4 * 4 + 2 * 24 * 4 + 2 * 4 * 12)
    assert added == 2 * MATRICES + 4 * scales


def test_blockwise_inputs_have_a_scale_for_128_tokens() -> None:
    """Beside a byte per element, in the layout of backward: 512 tokens are 4 blocks, of each feature."""
    saved = {recipe: held(run(recipe), Component.ACTIVATIONS) for recipe in ("blockwise", "tensorwise")}

    assert saved["blockwise"] - saved["tensorwise"] == L * 4 * (TOKENS // 128) * (D + D + F)


@pytest.mark.parametrize(("recipe", "gpu", "copies"), [("tensorwise", "h100-80gb", 2), ("tensorwise", "b200", 1)])
def test_weights_in_8_bits_alone(recipe: str, gpu: str, copies: int) -> None:
    """The 16-bit copy of the matrices is gone, from the start on; masters stay as they were, and so do gradients."""
    options = {"implementation": "megatron", "b": B, "s": S, "fp8": recipe}
    spread = {"zero_stage": 1, "data_parallel": 2}
    both, alone = (
        estimate({"model": LLAMA, "training": options | {"fp8_params": only}, "parallelism": spread}, gpu=gpu)
        for only in (False, True)
    )

    assert held(both, Component.WEIGHTS) - held(alone, Component.WEIGHTS) == 2 * MATRICES
    plain = held(both, Component.WEIGHTS, "model")  # no cache yet
    assert plain - held(alone, Component.WEIGHTS, "model") == (2 - copies) * MATRICES
    for component in (Component.MASTER_WEIGHTS, Component.GRADIENTS, Component.OPTIMIZER_STATE):
        assert held(both, component, "zero_grad_2") == held(alone, component, "zero_grad_2")


def test_delayed_scaling_remembers_largest_values() -> None:
    """1024 steps of three tensors in forward and two in backward, fp32, of each of four matrices a layer."""
    delayed, tensorwise = run("delayed"), run("tensorwise")

    assert held(delayed, Component.WEIGHTS) - held(tensorwise, Component.WEIGHTS) == 4 * L * 4 * 1024 * 3
    assert held(delayed, Component.WEIGHTS, "zero_grad_2") - held(tensorwise, Component.WEIGHTS, "zero_grad_2") == (
        4 * L * 4 * 1024 * (3 + 2)
    )


def test_inputs_are_kept_in_a_byte() -> None:
    """Of both norms' outputs and of the activation; attention keeps its own output in 16 bits, delayed or not."""
    saved = {recipe: held(run(recipe), Component.ACTIVATIONS) for recipe in ("none", "tensorwise", "delayed")}

    assert saved["none"] - saved["tensorwise"] == L * TOKENS * (D + D + F)
    assert saved["delayed"] - saved["tensorwise"] == L * TOKENS * D


def test_ranks_split_the_caches() -> None:
    splits: list[dict[str, Any]] = [
        {},
        {"tensor_parallel": 2, "sequence_parallel": True},
        {"pipeline_parallel": 2},
    ]
    caches = [held(run("tensorwise", **split), Component.WEIGHTS, word="in FP8") for split in splits]

    assert caches == [2 * MATRICES, MATRICES, MATRICES]


def test_the_vendors_example() -> None:
    """A matrix [1024, 1024], 1024 tokens (Transformer Engine's documentation): 2 + 1 + 1 + 2 MB, and 2 + 2 + 2 MB.

    Weight, its 8 bits, the input that is kept, the output; where no transposed copy is made.
    """
    model = {"l": 1, "d": 1024, "h": 8, "intermediate_size": 1024, "V": 1024, "position_embedding": "rope"}
    sums = {}
    for fp8 in ("none", "tensorwise"):
        training = {"implementation": "megatron", "b": 1, "s": 1024, "fp8": fp8, "loss": "fused"}
        ledger = estimate({"model": model, "training": training}, gpu="b200").ledger
        rows = [row for row in ledger.rows if "loss_1" in row.phases and "mlp.up_proj" in f"{row.module}.{row.tensor}"]
        normed = [row for row in ledger.rows if "post_attention_norm output" in row.tensor and "loss_1" in row.phases]
        wanted = ("weight", "weight in FP8", "mlp.up_proj input in FP8", "mlp.up_proj output")
        found = [row.bytes for row in rows if row.tensor in wanted and row.component != Component.GRADIENTS]
        sums[fp8] = sorted([*found, *(row.bytes for row in normed)])

    mb = 1024 * 1024
    assert sums["none"] == [2 * mb, 2 * mb, 2 * mb]
    assert sums["tensorwise"] == [1 * mb, 1 * mb, 2 * mb, 2 * mb]


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "mxfp8", "blockwise"])
def test_sums_hold_with_experts_and_recomputation(recipe: str) -> None:
    moe = {"num_experts": 8, "num_experts_per_token": 2, "expert_intermediate_size": 512}
    for recompute in ("none", "full", "selective"):
        training = {"implementation": "megatron", "s": 256, "fp8": recipe, "recompute": recompute}
        result = estimate({"model": LLAMA | {"moe": moe}, "training": training}, gpu="b200")
        for phase in result.ledger.phases:
            assert sum(result.ledger.components(phase).values()) == result.ledger.totals[phase]
    assert any("not compared with a run" in line and "FP8" in line for line in result.not_modelled)


REFUSED: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "modules": (
        {"implementation": "plain"},
        None,
        (
            "fp8 = delayed is not supported by torchao, which implementation = plain uses. Set fp8: tensorwise or "
            "rowwise or rowwise-gw-hp, or implementation: megatron."
        ),
    ),
    "an older card": (
        {},
        "a100-80gb",
        (
            "fp8 = delayed needs compute capability 8.9, but NVIDIA A100 80GB SXM has 8.0. Use a newer GPU, or set "
            "fp8: "
            "none."
        ),
    ),
    "a card without blocks of scales": (
        {"fp8": "mxfp8"},
        "h100-80gb",
        "fp8 = mxfp8 needs compute capability 10.0, but NVIDIA H100 SXM has 9.0. Use a newer GPU, or set fp8: none.",
    ),
    "weights in 8 bits without their optimizer": (
        {"fp8_params": True},
        None,
        (
            "fp8_params = true needs Megatron-LM's distributed optimizer, but zero_stage = 0. Set fp8_params: false, "
            "or zero_stage: 1."
        ),
    ),
    "tokens": (
        {"s": 4, "b": 1},
        None,
        (
            "fp8 = delayed needs a multiple of 8 tokens, but b·s = 4 on a rank. Choose another sequence_length, or set "
            "fp8: none."
        ),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    training, gpu, message = REFUSED[name]
    base: dict[str, Any] = {"implementation": "megatron", "fp8": "delayed"}
    with pytest.raises(InputError) as raised:
        load({"model": LLAMA, "training": base | training}, gpu=gpu)

    assert str(raised.value).endswith(message)


def test_sides_are_multiples_of_16() -> None:
    with pytest.raises(InputError, match=r"multiples of 16, but intermediate_size = 1544 on a rank\."):
        load(
            {
                "model": LLAMA | {"intermediate_size": 1544},
                "training": {"implementation": "megatron", "fp8": "tensorwise"},
            }
        )
