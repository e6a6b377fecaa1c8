"""What `parallelism.fsdp` may hold: the rules, in whole sentences."""

from __future__ import annotations

import pytest

from memcalc.errors import InputError
from memcalc.spec.loading import load

MODEL = {"l": 2, "d": 64, "h": 4, "V": 100}
SHARDED = {"engine": "fsdp2", "zero_stage": 3, "data_parallel": 2}
FLAT = SHARDED | {"engine": "fsdp1"}


@pytest.mark.parametrize(
    ("training", "parallelism", "message"),
    [
        (
            {},
            {"fsdp": {"wrap": "layers-and-ends"}},
            (
                "parallelism.fsdp: the block fsdp needs engine = fsdp1 or fsdp2, but engine = ddp. Set engine: fsdp1 or "
                "fsdp2, or leave fsdp out."
            ),
        ),
        (
            {"dtype": "fp16", "recipe": "amp"},
            SHARDED | {"fsdp": {"param_dtype": "bf16"}},
            (
                "parallelism.fsdp.param_dtype: param_dtype = bf16 is not dtype = fp16: modules compute in the dtype "
                "that FSDP gathers. Set param_dtype: fp16, or dtype: bf16."
            ),
        ),
        (
            {},
            SHARDED | {"fsdp": {"param_dtype": "bf16", "output_dtype": "fp32"}},
            (
                "parallelism.fsdp.output_dtype: output_dtype = fp32 is not dtype = bf16: casts of outputs are not "
                "modelled. Set output_dtype: bf16, or leave output_dtype out."
            ),
        ),
        (
            {},
            SHARDED | {"fsdp": {"keeps_unsharded_weights": True}},
            (
                "parallelism.fsdp.keeps_unsharded_weights: keeps_unsharded_weights needs a 4-bit base, but finetune = "
                "full. Set finetune: qlora, or leave keeps_unsharded_weights out."
            ),
        ),
        (
            {"finetune": "qlora"},
            SHARDED | {"fsdp": {"weights_from": "host"}},
            (
                "parallelism.fsdp.weights_from: weights_from = host is not modelled with finetune = qlora. Leave "
                "weights_from out."
            ),
        ),
        (
            {"recipe": "mixed-16"},
            SHARDED | {"fsdp": {"param_dtype": "bf16"}},
            (
                "training.recipe: recipe = mixed-16 adds fp32 master weights, but with fsdp.param_dtype the shards are "
                "the masters. Set recipe: fp32 (no autocast) or amp (autocast as well), or leave param_dtype out."
            ),
        ),
        (
            {"recipe": "pure"},
            SHARDED | {"fsdp": {"gradient_sync": "last"}, "offload": "all"},
            (
                "parallelism.fsdp.gradient_sync: gradient_sync = last is not modelled with offload = all. Set "
                "gradient_sync: each, or offload: none."
            ),
        ),
        (
            {"recipe": "fp32", "dtype": "bf16"},
            SHARDED,
            (
                "training.recipe: recipe = fp32 computes in fp32, but dtype = bf16. Set dtype: fp32, or recipe: amp to "
                "compute in 16 bits with fp32 weights."
            ),
        ),
        (
            {},
            SHARDED | {"fsdp": {"use_orig_params": True}},
            (
                "parallelism.fsdp.use_orig_params: use_orig_params = true needs engine = fsdp1, but engine = fsdp2. Leave "
                "use_orig_params out, or set engine: fsdp1."
            ),
        ),
        (
            {"recipe": "pure"},
            FLAT | {"fsdp": {"wrap": "layers-and-ends"}},
            (
                "parallelism.fsdp.wrap: wrap = layers-and-ends needs engine = fsdp2, but engine = fsdp1. Leave wrap "
                "out, or set engine: fsdp2."
            ),
        ),
        (
            {"finetune": "lora"},
            FLAT,
            (
                "parallelism.fsdp.wrap: wrap = layers is not modelled with finetune = lora and engine = fsdp1: units "
                "would have frozen and trained parameters. Set wrap: layers-and-trained, or engine: fsdp2."
            ),
        ),
        (
            {"recipe": "pure"},
            FLAT | {"fsdp": {"wrap": "layers-and-trained"}},
            (
                "parallelism.fsdp.wrap: wrap = layers-and-trained needs adapters, but finetune = full. Set finetune: "
                "lora or qlora, or leave wrap out."
            ),
        ),
        (
            {"finetune": "qlora", "qlora": {"quant_storage": "uint8"}},
            FLAT | {"fsdp": {"wrap": "layers-and-trained"}},
            (
                "training.qlora.quant_storage: 4-bit weights packed in uint8 do not run under FSDP1, which flattens "
                "parameters of one dtype: other frozen weights are in bf16. Set quant_storage: compute and "
                "base_dtype: compute, or engine: fsdp2."
            ),
        ),
        (
            {"recipe": "mixed-16"},
            FLAT,
            (
                "training.recipe: recipe = mixed-16 is not modelled with engine = fsdp1. Set recipe: pure or amp or "
                "fp32, or engine: fsdp2."
            ),
        ),
        (
            {"recipe": "pure"},
            FLAT | {"fsdp": {"load_dtype": "bf16"}},
            (
                "parallelism.fsdp.load_dtype: load_dtype = bf16 needs fp32 shards, but recipe = pure. Set recipe: amp, or "
                "leave load_dtype out."
            ),
        ),
        (
            {"recipe": "pure"},
            FLAT | {"tensor_parallel": 2},
            (
                "parallelism.tensor_parallel: tensor_parallel = 2 is not modelled with engine = fsdp1. Set "
                "tensor_parallel: 1, or engine: fsdp2."
            ),
        ),
    ],
)
def test_what_cannot_be_is_rejected(training: dict, parallelism: dict, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(InputError) as raised:
        load({"model": MODEL, "training": training, "parallelism": parallelism})

    assert str(raised.value) == f"configuration: {message}"


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(InputError, match="param_dtype"):
        load({"model": MODEL, "parallelism": SHARDED | {"fsdp": {"param_dtype": "bf8"}}})


def test_torchtitan_has_its_policy() -> None:
    spec = load({"model": MODEL | {"mlp": "swiglu"}, "parallelism": {"fsdp": None}})
    assert spec.parallelism.fsdp.is_default

    titan = load("llama-3.2-1b", ["tie_word_embeddings=false", "implementation=torchtitan", "data_parallel=2"])
    fsdp = titan.parallelism.fsdp
    assert (fsdp.param_dtype, fsdp.reduce_dtype) == ("bf16", "fp32")
