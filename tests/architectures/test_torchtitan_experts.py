"""torchtitan's mixture of experts under FSDP2: small runs on the null device, and what sharding and routing decide."""

from __future__ import annotations

from typing import Any

import pytest

from memcalc.api import estimate
from memcalc.architectures.catalogue import GradientPolicy, program
from memcalc.architectures.structure import block_structure
from memcalc.architectures.torchtitan_moe import ROUTERS
from memcalc.ledger.component import Component
from memcalc.ledger.result import Result
from memcalc.spec.rule_sets.parallelism import TORCHTITAN_EXPERTS

QWEN: dict[str, Any] = {
    "architecture": "qwen3_moe",
    "num_layers": 8,
    "hidden_size": 256,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 2048,
    "tie_word_embeddings": False,
    "moe": {"num_experts": 64, "num_experts_per_token": 8, "expert_intermediate_size": 768},
}
LLAMA: dict[str, Any] = {
    "architecture": "llama4_text",
    "num_layers": 6,
    "hidden_size": 256,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 16,
    "intermediate_size": 768,
    "vocab_size": 2048,
    "tie_word_embeddings": False,
    "qk_norm": False,
    "moe": {
        "num_experts": 8,
        "num_experts_per_token": 1,
        "expert_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "expert_interval": 2,
    },
}
DEEPSEEK: dict[str, Any] = {
    "architecture": "deepseek_v2",
    "num_layers": 6,
    "hidden_size": 256,
    "num_attention_heads": 16,
    "intermediate_size": 1024,
    "vocab_size": 2048,
    "tie_word_embeddings": False,
    "mla": {"q_lora_rank": 0, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    "moe": {
        "num_experts": 8,
        "num_experts_per_token": 3,
        "expert_intermediate_size": 256,
        "shared_expert_intermediate_size": 512,
        "first_dense_layers": 1,
    },
}
TENSOR: dict[str, Any] = {"data_parallel": 4, "tensor_parallel": 2, "sequence_parallel": True}
EXPERTS: dict[str, Any] = {"expert_parallel": 4}


def run(model: dict[str, Any], recompute: str = "none", gpu: str = "h100-80gb", **parallelism: Any) -> Result:
    """One sequence of 512 tokens on rank 0 of 8, as torchtitan's importer describes it."""
    config = {
        "model": model,
        "training": {
            "implementation": "torchtitan",
            "framework": "torchtitan",
            "b": 1,
            "s": 512,
            "optimizer_implementation": "fused",
            "recompute": recompute,
            "loss": "vocab-parallel" if "tensor_parallel" in parallelism else "materialized",
        },
        "parallelism": {
            "data_parallel": 8,
            "fsdp": {"param_dtype": "bf16", "reduce_dtype": "fp32", "wrap": "layers-and-ends"},
            **parallelism,
        },
    }
    return estimate(config, gpu=gpu)


# torchtitan 0.2.2, torch 2.13: debugmodel_moe of Qwen3, debugmodel of Llama 4, debugmodel_flex_attn of DeepSeek-V3 on
# the null CUDA device, rank 0 of 8 H100s (16 in the last case of Llama 4), two steps with PyTorch's memory history on.
# Peaks of allocated and of reserved bytes.
RECORDED: dict[str, tuple[dict[str, Any], str, dict[str, Any], int, int]] = {
    "shards": (QWEN, "none", {}, 1_255_321_088, 1_621_098_496),
    "by operator": (QWEN, "selective", {}, 1_083_049_984, 1_346_371_584),
    "recomputed": (QWEN, "full", {}, 1_077_773_312, 1_321_205_760),
    "experts": (QWEN, "none", EXPERTS, 953_865_728, 1_228_931_072),
    "experts, recomputed": (QWEN, "full", EXPERTS, 778_137_600, 945_815_552),
    "experts over tensor-parallel ranks": (
        QWEN,
        "none",
        TENSOR | EXPERTS | {"expert_tensor_parallel": 1},
        812_147_200,
        1_111_490_560,
    ),
    "weighed before": (LLAMA, "none", {}, 149_382_144, 218_103_808),
    "never resharded": (QWEN, "full", EXPERTS | {"zero_stage": 2, "engine": "fsdp2"}, 787_051_520, 1_115_684_864),
    "second axis": (LLAMA, "none", EXPERTS | {"data_parallel": 16}, 130_145_792, 171_966_464),
}


@pytest.mark.parametrize("case", RECORDED)
def test_small_runs_on_the_null_device(case: str) -> None:
    """Allocated memory within 0.05%; reserved memory is equal."""
    model, recompute, parallelism, allocated, reserved = RECORDED[case]

    result = run(model, recompute, **parallelism).replayed

    assert result.headline.ledger.peak_bytes == pytest.approx(allocated, rel=0.0005)
    assert max(rank.reserved_bytes or 0 for rank in result.ranks) == reserved


# The same, where DTensor's gradients of norms of queries and keys (tensor parallelism) are counted in another order, and
# where FlexAttention's output is freed earlier in backward.
NEAR = {
    "tensor parallelism": (QWEN, TENSOR, 938_093_568, 1_245_708_288, 0.003),
    "slices of experts": (QWEN, TENSOR | EXPERTS | {"expert_tensor_parallel": 2}, 792_269_824, 1_056_964_608, 0.005),
    "latent attention": (DEEPSEEK, {}, 319_947_264, 406_847_488, 0.02),
}


@pytest.mark.parametrize("case", NEAR)
def test_small_runs_that_differ_slightly(case: str) -> None:
    """Within the share given above, and allocated memory is not under."""
    model, parallelism, allocated, reserved, within = NEAR[case]

    result = run(model, **parallelism).replayed

    assert allocated <= result.headline.ledger.peak_bytes <= allocated * (1 + within)
    assert max(rank.reserved_bytes or 0 for rank in result.ranks) == pytest.approx(reserved, rel=0.006)


def test_loops_over_experts_on_the_null_device() -> None:
    """The same for an A100, without and with expert parallelism (reserved +1.4%)."""
    alone, spread = (run(LLAMA, gpu="a100-80gb", **split).replayed for split in ({}, EXPERTS))

    assert alone.headline.ledger.peak_bytes == pytest.approx(98_716_672, rel=0.0005)
    assert alone.ranks[0].reserved_bytes == 169_869_312
    assert spread.headline.ledger.peak_bytes == pytest.approx(91_133_952, rel=0.003)
    assert spread.ranks[0].reserved_bytes == pytest.approx(155_189_248, rel=0.015)


def weights_of_experts(result: Result) -> int:
    rows = (row for row in result.ledger.rows if row.component is Component.WEIGHTS and ".experts." in row.module)
    return sum(row.bytes for row in rows)


@pytest.mark.parametrize("ranks", [8, 16, 64])
@pytest.mark.parametrize("expert_parallel", [2, 8])
def test_every_rank_has_an_equal_part_of_the_experts(ranks: int, expert_parallel: int) -> None:
    """8 experts in 3 layers, each of three fp32 matrices; more ranks than experts share their second axis."""
    whole = 3 * 8 * 3 * 4 * 256 * 512

    result = run(LLAMA, data_parallel=ranks, expert_parallel=expert_parallel)

    assert weights_of_experts(result) == whole // ranks


def test_without_expert_parallelism_the_first_axis_is_padded() -> None:
    """FSDP2 shards rows: of 64 ranks with 8 experts the first ones have one whole expert each."""
    assert weights_of_experts(run(LLAMA, data_parallel=64)) == 3 * 3 * 4 * 256 * 512


@pytest.mark.parametrize(("gpu", "made"), [("h100-80gb", 3), ("a100-80gb", 6)])
def test_gpus_without_grouped_gemms_add_gradients_of_slices(gpu: str, made: int) -> None:
    """A loop over experts writes the gradient of each expert's slice into zeros as large as the weight of all."""
    spec = run(LLAMA, gpu=gpu).spec
    block = program(block_structure(spec), "expert layer", False, GradientPolicy(kept=True, main_dtype=None))

    shapes = [block.storages[event.storage].shape for event in block.backward if event.sign > 0]

    assert sum(len(shape) == len(("E", "F_e", "d")) and shape[0] == "E" for shape in shapes) == made


def test_each_architecture_with_experts_has_a_router() -> None:
    assert set(ROUTERS) == set(TORCHTITAN_EXPERTS)
