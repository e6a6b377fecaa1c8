"""DeepSpeed's file beside TrainingArguments: the sizes of its buffers, `auto` included, and what its release copies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import memcalc
from memcalc.simulation.simulated_run import unsupported_reason
from memcalc.spec.zero import ZeroSpec

FILE = """\
model_name_or_path: HuggingFaceTB/SmolLM2-360M
per_device_train_batch_size: 1
deepspeed: ds.json
{precision}
"""
NAMED = ("framework=trainer", "versions.transformers=v5.23.0", "data_parallel=4", "s=512", "padding_mask=none")
WIDTH = 960
AUTO = {f"{name}_bucket_size": "auto" for name in ("reduce", "stage3_prefetch")}
AUTO["stage3_param_persistence_threshold"] = "auto"


def spec_of(
    folder: Path, zero: dict[str, object], precision: str, *settings: str, optimizer: dict[str, object] | None = None
) -> memcalc.Spec:
    block = {} if optimizer is None else {"optimizer": optimizer}
    (folder / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3} | zero, **block}))
    path = folder / "run.yaml"
    path.write_text(FILE.format(precision=precision))
    return memcalc.load(path, *NAMED, *settings)


def test_auto_is_of_the_models_width(tmp_path: Path) -> None:
    """transformers 5.23 integrations/deepspeed.py: the width squared, nine tenths of that, ten widths."""
    zero = spec_of(tmp_path, dict(AUTO), "bf16: true").parallelism.zero_optimization

    assert zero.reduce_bucket_size == WIDTH**2
    assert zero.prefetch_bucket_size == int(0.9 * WIDTH**2)
    assert zero.param_persistence_threshold == 10 * WIDTH


def test_a_reference_model_has_the_default_sizes_for_auto(tmp_path: Path) -> None:
    """TRL 1.16 trainer/dpo_trainer.py, __init__: its engine is made before Trainer computes what is auto."""
    given: dict[str, object] = {**AUTO, "stage3_param_persistence_threshold": 1000}
    zero = spec_of(tmp_path, given, "bf16: true").parallelism.zero_optimization

    assert zero.prefetch_bucket_size == int(0.9 * WIDTH**2)
    assert zero.of_reference().prefetch_bucket_size == ZeroSpec().prefetch_bucket_size
    assert zero.of_reference().param_persistence_threshold == 1000


@pytest.mark.parametrize(
    ("precision", "casts"),
    [
        ("bf16: true\ntorch_dtype: float32", True),
        ("bf16: true\ntorch_dtype: bfloat16", False),
        ("bf16: false\ntorch_dtype: float32", False),
    ],
)
def test_zero_init_casts_fp32_weights_to_16_bits(precision: str, casts: bool, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, {}, precision, "versions.deepspeed=v0.19.8")

    assert spec.parallelism.zero_optimization.casts_fp32_weights is casts


@pytest.mark.parametrize(("said", "expected"), [(5e7, 50_000_000), ("2e8", 200_000_000), ("large", 500_000_000)])
def test_a_size_is_a_number_of_any_form(said: object, expected: int, tmp_path: Path) -> None:
    zero = spec_of(tmp_path, {"reduce_bucket_size": said}, "bf16: true").parallelism.zero_optimization

    assert zero.reduce_bucket_size == expected


@pytest.mark.parametrize(
    ("precision", "release", "copies"),
    [
        ("bf16: false\ntorch_dtype: float32", "v0.19.8", True),
        ("bf16: false\ntorch_dtype: float32", "v0.18.2", False),
        ("bf16: true", "v0.19.8", False),
    ],
)
def test_fp32_weights_are_copied_since_a_release(precision: str, release: str, copies: bool, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, {}, precision, f"versions.deepspeed={release}")

    assert spec.parallelism.zero_optimization.copies_fp32_weights is copies


def test_an_own_file_of_deepspeeds_has_its_sizes(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": 1,
                "bf16": {"enabled": True},
                "zero_optimization": {"stage": 3, "reduce_bucket_size": 1000, "stage3_prefetch_bucket_size": 0},
            }
        )
    )
    spec = memcalc.load(path, "preset=gpt2", "data_parallel=2", "s=128")

    assert (
        spec.parallelism.zero_optimization.reduce_bucket_size,
        spec.parallelism.zero_optimization.prefetch_bucket_size,
    ) == (1000, 0)


def test_a_hub_id_under_zero_has_deepspeeds_16_bits() -> None:
    """DeepSpeed keeps fp32 master weights: 2 bytes of weights, and 2 + 12 sharded over 8 ranks, per parameter."""
    run = ("parallelism.zero_stage=2", "data_parallel=8")
    spec = memcalc.load("meta-llama/Llama-3.1-8B", *run)

    assert (spec.parallelism.engine, spec.training.recipe, spec.training.dtype) == ("deepspeed", "mixed-16", "bf16")
    assert memcalc.load("meta-llama/Llama-3.1-8B", "zero_stage=3", "data_parallel=8").training.recipe == "pure"


@pytest.mark.parametrize(
    ("said", "expected"), [({}, None), ({"overlap_comm": True}, True), ({"overlap_comm": False}, False)]
)
def test_reductions_overlap_as_the_file_says(said: dict[str, object], expected: bool | None, tmp_path: Path) -> None:
    zero = spec_of(tmp_path, {"stage": 2} | said, "bf16: true").parallelism.zero_optimization

    assert zero.overlap_comm is expected
    assert zero.overlaps(2) is bool(expected)
    assert zero.overlaps(3) is (expected is not False)


@pytest.mark.parametrize(
    ("optimizer", "groups", "implementation"),
    [
        (None, True, "foreach"),
        ({"type": "AdamW"}, False, "fused"),
        ({"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}, False, "foreach"),
    ],
)
def test_trainers_optimizer_has_a_group_without_weight_decay(
    optimizer: dict[str, object] | None, groups: bool, implementation: str, tmp_path: Path
) -> None:
    """DeepSpeed's own optimizer gets all parameters as one group (integrations/deepspeed.py, deepspeed_optim_sched)."""
    spec = spec_of(tmp_path, {}, "bf16: true\noptim: adamw_torch", optimizer=optimizer)

    assert spec.parallelism.zero_optimization.separate_no_decay is groups
    assert spec.training.optimizer_implementation == implementation


def test_auto_reads_the_width_by_its_other_names(tmp_path: Path) -> None:
    """GPT-2's config has n_embd, which transformers reads as hidden_size."""
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}))
    (tmp_path / "run.yaml").write_text(
        FILE.format(precision="bf16: true").replace("HuggingFaceTB/SmolLM2-360M", "openai-community/gpt2")
    )

    assert memcalc.load(tmp_path / "run.yaml", *NAMED).parallelism.zero_optimization.reduce_bucket_size == 768**2


@pytest.mark.parametrize(("stage", "dtype"), [(2, "compute"), (3, "fp32")])
def test_adapters_keep_fp32_where_zero_init_makes_the_model(stage: int, dtype: str, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, {"stage": stage}, "bf16: true\nuse_peft: true")

    assert spec.training.lora is not None
    assert (spec.training.lora.adapter_dtype, spec.training.recipe) == (dtype, "mixed-16")


@pytest.mark.parametrize(("release", "dtype"), [("1.16.0", "compute"), ("1.7.0", "compute"), ("1.6.0", "fp32")])
def test_trl_gives_adapters_the_dtype_of_the_base_since_a_release(release: str, dtype: str, tmp_path: Path) -> None:
    words = ("framework=sft", f"versions.trl={release}")
    spec = spec_of(tmp_path, {"stage": 3}, "bf16: true\nuse_peft: true", *words)

    assert spec.training.lora is not None
    assert spec.training.lora.adapter_dtype == dtype


@pytest.mark.parametrize(("stage", "weights", "recipe"), [(2, "", "mixed-16"), (0, "bfloat16", "pure"), (0, "", "amp")])
def test_adapters_of_a_4_bit_base_have_fp32_masters_under_zero(
    stage: int, weights: str, recipe: str, tmp_path: Path
) -> None:
    """TRL casts them to bf16; DeepSpeed copies its partition of them to fp32 (runtime/zero/stage_1_and_2.py).

    TRL loads other weights in fp32 by default, which autocast casts.
    """
    words = ("bf16: true", "use_peft: true", "load_in_4bit: true", *([f"dtype: {weights}"] if weights else []))
    text = FILE.format(precision="\n".join(words))
    path = tmp_path / "run.yaml"
    path.write_text(text if stage else text.replace("deepspeed: ds.json\n", ""))
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    spec = memcalc.load(path, *NAMED, "framework=sft")

    assert spec.training.recipe == recipe
    assert unsupported_reason(spec) == ""
