"""What `parallelism.fsdp` may hold: the rules, in whole sentences."""

from __future__ import annotations

import pytest

from memcalc.errors import InputError
from memcalc.spec.loading import load

MODEL = {"l": 2, "d": 64, "h": 4, "V": 100}
SHARDED = {"engine": "fsdp2", "zero_stage": 3, "data_parallel": 2}


@pytest.mark.parametrize(
    ("training", "parallelism", "message"),
    [
        (
            {},
            {"fsdp": {"wrap": "layers-and-ends"}},
            (
                "parallelism.fsdp: the block fsdp needs engine = fsdp2, but engine = ddp. Set engine: fsdp2, or leave "
                "fsdp out."
            ),
        ),
        (
            {"dtype": "fp16", "recipe": "amp"},
            SHARDED | {"fsdp": {"param_dtype": "bf16"}},
            (
                "parallelism.fsdp.param_dtype: param_dtype = bf16 is not dtype = fp16: modules compute in the dtype "
                "that FSDP2 gathers. Set param_dtype: fp16, or dtype: bf16."
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
