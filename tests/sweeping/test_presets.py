"""Published models under every implementation, engine, schedule and loss: tables equal single estimates."""

from typing import Any

import pytest

from memcalc.sweeping import evaluate
from tests.sweeping.test_evaluation import assert_same
from tests.thinning import quick_every

MEGATRON = "implementation=megatron"
PIPELINE = ("pipeline_parallel=4", "gradient_accumulation_steps=8")


@pytest.mark.parametrize(
    ("preset", "overrides"),
    quick_every(
        2,
        [
            ("gpt2", ("implementation=huggingface", "zero_stage=3", "data_parallel=8")),
            ("gpt3", ("recompute=selective", "tensor_parallel=8", "sequence_parallel=true", *PIPELINE)),
            ("llama-3-8b", (MEGATRON, "tensor_parallel=2", "schedule=interleaved", "virtual_stages=2", *PIPELINE)),
            ("llama-3-8b", (MEGATRON, "tensor_parallel=2", *PIPELINE)),
            ("llama-3-8b", (MEGATRON, "context_parallel=2", "tensor_parallel=2", "sequence_parallel=true")),
            ("llama-3-8b", ("implementation=torchtitan", "data_parallel=8")),
            ("llama-3-8b", ("loss=chunked", "recompute=every-3")),
            ("llama-3-8b", ("loss=fused", "zero_stage=2", "data_parallel=4")),
            ("llama-3-8b", ("finetune=qlora", "implementation=huggingface", "recompute=full")),
            ("mixtral-8x7b", ("expert_parallel=4", "data_parallel=4", "zero_stage=1")),
            ("deepseek-v3", ("schedule=dualpipe", "recompute=[3, 7, 8]", *PIPELINE)),
            ("deepseek-v3", (MEGATRON, "expert_parallel=8", "data_parallel=8", "tensor_parallel=2")),
            ("gpt2", ("recompute=[0-2, 3-5]",)),
        ],
        unpack=True,
    ),
)
def test_tables_equal_single_estimates(preset, overrides):
    axes: dict[str, Any] = {"s": [256, 1024], "b": [1, 2, 7]}
    assert_same(preset, evaluate(preset, axes, *overrides, gpu="h100-80gb"), *overrides, gpu="h100-80gb")
