"""The blocks `lora` and `qlora`: their defaults, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from memcalc.api import load
from memcalc.errors import InputError
from memcalc.spec.defaults import default_training
from memcalc.spec.finetuning import adaptable_modules, adapted_modules
from memcalc.spec.training import TrainingSpec

MODEL = {"l": 2, "d": 64, "h": 4, "V": 96}


def training(**given: Any) -> dict[str, Any]:
    return default_training(given, {})


def test_a_block_lora_asks_for_lora_and_a_block_qlora_for_qlora() -> None:
    assert training(lora={})["finetune"] == "lora"
    assert training(qlora={})["finetune"] == "qlora"
    assert training(lora={}, qlora={})["finetune"] == "qlora"
    assert "finetune" not in training()


def test_a_frozen_base_is_held_in_the_compute_dtype_and_adapters_in_fp32() -> None:
    """As transformers loads a model in bf16, and PEFT makes adapters (autocast_adapter_dtype)."""
    filled = TrainingSpec(**training(finetune="lora", sequence_length=8))

    assert filled.recipe == "pure"
    assert filled.lora is not None
    assert (filled.lora.base_dtype, filled.lora.adapter_dtype) == ("compute", "fp32")
    assert filled.qlora is None


@pytest.mark.parametrize(
    ("recipe", "base", "adapter"),
    [("amp", "fp32", "fp32"), ("fp32", "fp32", "fp32"), ("mixed-16", "compute", "compute")],
)
def test_the_recipe_decides_the_precisions(recipe: str, base: str, adapter: str) -> None:
    lora = training(finetune="lora", recipe=recipe)["lora"]

    assert (lora["base_dtype"], lora["adapter_dtype"]) == (base, adapter)


@pytest.mark.parametrize(
    ("recompute", "needed"), [("none", False), ("selective", False), ("full", True), ("every-2", True), ([1], True)]
)
def test_recomputed_layers_need_an_input_with_a_gradient(recompute: object, needed: bool) -> None:
    """PEFT switches it on with gradient checkpointing (peft_model.py, _prepare_model_for_gradient_checkpointing)."""
    assert training(finetune="lora", recompute=recompute)["lora"]["input_require_grads"] is needed


@pytest.mark.parametrize(
    ("preset", "implementation", "modules"),
    [
        ("gpt2", "plain", "qkv_proj o_proj up_proj down_proj"),
        ("llama-2-7b", "plain", "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"),
        ("phi-3.5-moe", "plain", "q_proj k_proj v_proj o_proj"),
        ("glm-4-9b", "plain", "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"),
        ("glm-4-9b", "huggingface", "q_proj k_proj v_proj o_proj gate_up_proj down_proj"),
        ("deepseek-v3", "plain", "q_a_proj q_b_proj kv_a_proj kv_b_proj o_proj gate_proj up_proj down_proj"),
    ],
)
def test_adapters_stand_beside_the_linear_layers_of_the_family(preset: str, implementation: str, modules: str) -> None:
    assert adaptable_modules(load(preset).model, implementation) == tuple(modules.split())


@pytest.mark.parametrize(
    ("targets", "modules"),
    [
        ("all-linear", "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"),
        ("attention", "q_proj k_proj v_proj o_proj"),
        ("mlp", "gate_proj up_proj down_proj"),
        (["v_proj", "q_proj"], "q_proj v_proj"),
        (["lm_head", "qkv_proj", "q_proj"], "q_proj lm_head"),  # PEFT ignores a name without a layer
    ],
)
def test_targets_are_named_one_by_one_or_as_a_group(targets: object, modules: str) -> None:
    lora = TrainingSpec(**training(lora={"target_modules": targets}, sequence_length=8)).lora

    assert lora is not None
    assert adapted_modules(lora, load("llama-2-7b").model, "plain") == tuple(modules.split())


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (
            {"finetune": "full", "lora": {}},
            "training.lora: the block lora is set, but finetune = full. Set finetune: lora, or remove the block.",
        ),
        (
            {"finetune": "lora", "qlora": {}},
            "training.qlora: the block qlora is set, but finetune = lora. Set finetune: qlora, or remove the block.",
        ),
        (
            {"lora": {"target_modules": ["qkv_proj"]}},
            (
                "training.lora.target_modules: target_modules names qkv_proj, which the layers of this model do not "
                "have. Choose from q_proj, k_proj, v_proj, o_proj, up_proj, down_proj."
            ),
        ),
        (
            {"lora": {"target_modules": ["q_proj", "lm_head"]}, "loss": "fused"},
            (
                "training.lora.target_modules: target_modules names lm_head, but loss = fused does not call the LM "
                "head. Set loss: materialized or chunked, or leave lm_head out."
            ),
        ),
        (
            {"recipe": "mixed-16", "lora": {"adapter_dtype": "fp32"}},
            (
                "training.lora.adapter_dtype: adapter_dtype = fp32, but recipe mixed-16 stores fp32 master weights of "
                "16-bit weights. Set adapter_dtype: compute, or recipe: pure."
            ),
        ),
        (
            {"recipe": "mixed-16", "lora": {"adapter_dtype": "bf16"}},
            (
                "training.lora.adapter_dtype: adapter_dtype = bf16 is for adapters of a step in fp32 or bf16 without "
                "master weights. Set adapter_dtype: compute."
            ),
        ),
        (
            {"lora": {"base_dtype": "fp32"}},
            (
                "training.lora.base_dtype: base_dtype = fp32, but recipe pure computes in bf16 without autocast. "
                "Set recipe: amp, which casts, or base_dtype: compute."
            ),
        ),
        (
            {"lora": {"rank": 0}},
            "training.lora.rank: rank = 0 is too small. Set more than 0.",
        ),
        (
            {"lora": {"ranks": 8}},
            "training.lora.ranks: unknown field 'ranks' in training.lora. Did you mean rank?",
        ),
        (
            {"qlora": {"block_size": 63}},
            (
                "training.qlora.block_size: block_size = 63 is not a known value. Choose 32, 64, 128, 256, 512, 1024, "
                "2048 or 4096."
            ),
        ),
    ],
)
def test_what_contradicts_itself_is_refused(block: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        load({"model": MODEL, "training": block})

    assert str(caught.value) == f"configuration: {message}"


@pytest.mark.parametrize("name", ["tensor_parallel", "pipeline_parallel"])
def test_splits_that_adapters_were_not_written_for_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"{name} = 2 is not modelled with finetune = lora"):
        load({"model": MODEL, "training": {"finetune": "lora"}, "parallelism": {name: 2}})
