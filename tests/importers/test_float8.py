"""FP8 settings of other frameworks as memcalc fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import memcalc
from tests.importers.excerpts import ACCELERATE, AXOLOTL, LLAMA_FACTORY, NEMO, TORCHTITAN
from tests.importers.test_frameworks import imported

FIELDS = ("fp8", "fp8_skip", "fp8_all_gather", "fp8_params")
OURS = ("lm_head", "mlp.router")


def read(folder: Path, name: str, text: str, *overrides: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The fields of the training block, and the notes."""
    path = folder / name
    path.write_text(text)
    spec = memcalc.load(str(path), *overrides)
    return {field: getattr(spec.training, field) for field in FIELDS}, spec.origin.notes


def fields(fp8: str, skip: tuple[str, ...] = OURS, *, gathers: bool = False, params: bool = False) -> dict[str, Any]:
    return dict(zip(FIELDS, (fp8, skip, gathers, params), strict=True))


FLOAT8 = """
[quantize.linear.float8]
enable_fsdp_float8_all_gather = true
precompute_float8_dynamic_scale_for_fsdp = true
recipe_name = "{recipe}"
filter_fqns = ["output", "attention.wk", "auto_filter_small_kn"]
"""


def test_torchtitan_converts_the_configured_modules(tmp_path: Path) -> None:
    text = TORCHTITAN.replace("[model]", '[model]\nconverters = ["quantize.linear.float8"]') + FLOAT8
    found, notes = read(tmp_path, "run.toml", text.format(recipe="tensorwise"), "data_parallel=8")

    assert found == fields("tensorwise", ("lm_head", "k_proj"), gathers=True)
    assert any("filter_fqns auto_filter_small_kn" in note for note in notes)
    found, _ = read(tmp_path, "run.toml", text.format(recipe="rowwise_with_gw_hp"), "data_parallel=8")
    assert found == fields("rowwise-gw-hp", ("lm_head", "k_proj"))


def test_torchtitan_splits_converted_modules(tmp_path: Path) -> None:
    """Only 0.1, where the converter is named float8, gathers activations in FP8, which is not modelled."""
    text = TORCHTITAN.replace("tensor_parallel_degree = 1", "tensor_parallel_degree = 2")
    new, old = (
        text.replace("[model]", f'[model]\nconverters = ["{name}"]') + FLOAT8
        for name in ("quantize.linear.float8", "float8")
    )
    found, _ = read(tmp_path, "run.toml", new.format(recipe="tensorwise"), "data_parallel=8")
    assert found == fields("tensorwise", ("lm_head", "k_proj"), gathers=True)
    found, notes = read(tmp_path, "run.toml", old.format(recipe="tensorwise"), "data_parallel=8")
    assert found == fields("none")
    assert any("activations gathered in FP8, as in torchtitan 0.1" in note for note in notes)
    found, _ = read(tmp_path, "run.toml", old.format(recipe="rowwise"), "data_parallel=8")
    assert found == fields("rowwise", ("lm_head", "k_proj"))


def test_a_section_without_its_converter_does_nothing(tmp_path: Path) -> None:
    found, _ = read(tmp_path, "run.toml", TORCHTITAN + FLOAT8.format(recipe="rowwise"), "data_parallel=8")

    assert found == fields("none")


def test_other_converters_are_reported(tmp_path: Path) -> None:
    text = TORCHTITAN.replace("[model]", '[model]\nconverters = ["quantize.linear.mx", "float8"]')
    found, notes = read(tmp_path, "run.toml", text, "data_parallel=8")

    assert found == fields("tensorwise", ())
    assert any("model.converters quantize.linear.mx" in note for note in notes)


FP8 = ACCELERATE.replace("mixed_precision: bf16", "mixed_precision: fp8")


@pytest.mark.parametrize(
    ("config", "expected", "told"),
    [
        ("", fields("tensorwise", gathers=True), "first linear layer"),
        ("fp8_config: {backend: AO, enable_fsdp_float8_all_gather: false}", fields("tensorwise"), "first linear layer"),
        (
            "fp8_config: {backend: TE, fp8_format: HYBRID}",
            fields("none"),
            "not modelled: FP8 matmuls by TE",
        ),
    ],
)
def test_accelerate(config: str, expected: dict[str, Any], told: str, tmp_path: Path) -> None:
    words = ("preset=llama-3-8b", "micro_batch_size=1")
    found, notes = read(tmp_path, "run.yaml", f"{FP8}\n{config}\n", *words)

    assert found == expected
    assert any(told in note for note in notes)


def test_axolotl(tmp_path: Path) -> None:
    text = AXOLOTL + "\nfp8: true\nfp8_enable_fsdp_float8_all_gather: true\n"
    found, _ = read(tmp_path, "run.yaml", text, "data_parallel=8")

    assert found == fields("tensorwise", gathers=True)


def test_with_adapters_it_is_reported(tmp_path: Path) -> None:
    found = imported(tmp_path, "run.yaml", AXOLOTL + "\nadapter: lora\nlora_r: 8\nfp8: true\n", "data_parallel=8")

    assert any("FP8 matmuls with adapters" in note for note in found.notes)


def test_llama_factory(tmp_path: Path) -> None:
    text = LLAMA_FACTORY.replace("finetuning_type: lora", "finetuning_type: full")
    found, _ = read(tmp_path, "run.yaml", f"{text}\nfp8: true\nfp8_backend: torchao\n", "data_parallel=8")

    assert found == fields("rowwise", ("lm_head",))
    found, notes = read(tmp_path, "run.yaml", f"{text}\nfp8: true\nfp8_backend: te\n", "data_parallel=8")
    assert found == fields("none")
    assert any("FP8 matmuls by te" in note for note in notes)


def test_nemo(tmp_path: Path) -> None:
    text = NEMO.replace("model:\n", "model:\n  fp8: true\n  fp8_hybrid: true\n  fp8_params: true\n", 1)
    found, _ = read(tmp_path, "run.yaml", text, "data_parallel=8", "V=32000")

    assert found["fp8"] == "delayed"
