"""What Hugging Face's Trainer does around a model, read from the arguments of those who use it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import memcalc
from memcalc.importers.loading import load
from memcalc.spec.training import TrainingSpec

MODEL = ("preset=qwen2.5-0.5b",)
TODAY = ("versions.transformers=v5.23",)


def read(folder: Path, release: tuple[str, ...] = TODAY, **arguments: Any) -> TrainingSpec:
    path = folder / "arguments.json"
    path.write_text(json.dumps({"per_device_train_batch_size": 2, "bf16": True} | arguments))
    return load(path, (*MODEL, *release, "data_parallel=8")).training


def test_silence_is_the_trainers_default(tmp_path: Path) -> None:
    """compute_loss returns the loss alone; max_grad_norm is 1; every logit is made."""
    training = read(tmp_path)

    assert training.logits_until == "loss"
    assert training.gradient_clipping == 1.0
    assert training.loss == "materialized"


@pytest.mark.parametrize(("norm", "clipping"), [(0.0, None), (0, None), (0.3, 0.3)])
def test_gradients_are_clipped_to_what_is_said(norm: float, clipping: float | None, tmp_path: Path) -> None:
    assert read(tmp_path, max_grad_norm=norm).gradient_clipping == clipping


@pytest.mark.parametrize(
    ("optim", "wide"),
    [("adamw_bnb_8bit", True), ("paged_adamw_8bit", True), ("lion_8bit", True), ("adamw_torch", False)],
)
def test_bitsandbytes_keeps_tables_in_32_bits(optim: str, wide: bool, tmp_path: Path) -> None:
    assert read(tmp_path, optim=optim).optimizer_options.embeddings_32bit is wide


def test_until_transformers_4_51_it_kept_none(tmp_path: Path) -> None:
    """trainer.py, create_optimizer: of an optimizer with a class named Adam8bit."""
    training = read(tmp_path, ("versions.transformers=v4.51.3",), optim="adamw_bnb_8bit")

    assert not training.optimizer_options.embeddings_32bit


def test_tables_that_fsdp_shards_are_those_that_bitsandbytes_knows(tmp_path: Path) -> None:
    """optim/optimizer.py, check_overrides: a module's own weight, which is then the shard."""
    training = read(tmp_path, optim="adamw_bnb_8bit", fsdp="full_shard")

    assert training.recipe == "fp32"
    assert training.optimizer_options.embeddings_32bit


@pytest.mark.parametrize("override", ["optimizer=adamw", "recipe=mixed-16", "implementation=plain"])
def test_what_the_user_sets_is_not_refused_for_what_the_file_implies(override: str, tmp_path: Path) -> None:
    path = tmp_path / "arguments.json"
    arguments = {"per_device_train_batch_size": 2, "bf16": True, "optim": "adamw_bnb_8bit", "use_liger_kernel": True}
    path.write_text(json.dumps(arguments))
    field, _, value = override.partition("=")

    assert getattr(load(path, (*MODEL, override)).training, field) == value


@pytest.mark.parametrize(
    ("config", "loss", "kernels"),
    [
        (None, "fused", "liger"),
        ({"rope": False}, "fused", "torch"),
        ({"cross_entropy": True, "fused_linear_cross_entropy": False}, "materialized", "liger"),
    ],
)
def test_ligers_kernels(config: dict[str, bool] | None, loss: str, kernels: str, tmp_path: Path) -> None:
    training = read(tmp_path, use_liger_kernel=True, liger_kernel_config=config)

    assert (training.loss, training.kernels) == (loss, kernels)


@pytest.mark.parametrize(
    ("field", "loss"),
    [("liger_fused_linear_cross_entropy", "fused"), ("cut_cross_entropy", "fused"), ("sample_packing", "materialized")],
)
def test_axolotls_words_for_it(field: str, loss: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"base_model: meta-llama/Llama-3.1-8B\nsequence_len: 512\nmicro_batch_size: 1\n{field}: true\n")

    assert load(path, ()).training.loss == loss


def test_axolotl_names_ligers_kernels_one_by_one(tmp_path: Path) -> None:
    """Liger's norms alone are listed as not modelled."""
    path = tmp_path / "run.yaml"
    text = "base_model: meta-llama/Llama-3.1-8B\nsequence_len: 512\nmicro_batch_size: 1\nliger_rms_norm: true\n"
    path.write_text(text)
    alone = memcalc.estimate(path)
    path.write_text(f"{text}liger_rope: true\nliger_glu_activation: true\n")
    together = load(path, ()).training

    assert any("rms_norm of Liger's kernels only" in note for note in alone.notes)
    assert (alone.spec.training.kernels, together.kernels, together.loss) == ("torch", "liger", "materialized")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"bf16": True, "torch_dtype": "bfloat16"}, ("pure", True)),
        ({"bf16": True, "torch_dtype": "float32"}, ("amp", True)),
        ({"torch_dtype": "bfloat16"}, ("pure", False)),
    ],
)
def test_trainer_autocasts_whatever_its_weights_are_in(
    arguments: dict[str, Any], expected: tuple[str, bool], tmp_path: Path
) -> None:
    """accelerator.py, prepare_model: mixed_precision alone decides."""
    training = read(tmp_path, **({"bf16": False} | arguments))

    assert (training.recipe, training.autocasts) == expected


TRLS = {"use_peft": True, "gradient_checkpointing": True, "deepspeed": {"zero_optimization": {"stage": 3}}}
TRL = (*TODAY, "versions.trl=v1.16")
OPTIONS = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}


@pytest.mark.parametrize(
    ("program", "more", "release", "is_reentrant"),
    [
        ("dpo", {}, TRL, True),  # passes the options on itself
        ("sft", {}, TRL, False),  # changes options that Trainer no longer reads
        ("sft", OPTIONS, TRL, True),  # which are the same as those it reads, if the file has any
        ("sft", {}, ("versions.transformers=v5.22", "versions.trl=v1.16"), True),
        ("dpo", {}, (*TODAY, "versions.trl=v1.8"), False),
        ("sft", OPTIONS, (*TODAY, "versions.trl=v0.27"), False),
        ("dpo", {"deepspeed": {"zero_optimization": {"stage": 2}}}, TRL, False),
        ("dpo", {"use_peft": False}, TRL, False),
        ("trainer", OPTIONS, TRL, False),
    ],
)
def test_trl_forces_reentrant_checkpoints_on_adapters_at_stage_3(
    program: str, more: dict[str, Any], release: tuple[str, ...], is_reentrant: bool, tmp_path: Path
) -> None:
    found = read(tmp_path, (f"framework={program}", *release), **(TRLS | more))

    assert found.reentrant_checkpoints is is_reentrant


def test_the_cache_is_emptied_before_backward_of_every_nth_step(tmp_path: Path) -> None:
    training = read(tmp_path, torch_empty_cache_steps=4)

    assert (training.empty_cache_steps, training.empty_cache_when) == (4, "before-backward")


@pytest.mark.parametrize(
    ("words", "steps", "when"),
    [
        ("rl: dpo\n", 1, "after-backward"),
        ("torch_empty_cache_steps: 5\n", 5, "before-backward"),
        ("gc_steps: 3\n", 3, "before-backward"),
        ("gc_steps: -1\n", None, "before-backward"),
    ],
)
def test_axolotl_empties_the_cache(words: str, steps: int | None, when: str, tmp_path: Path) -> None:
    """DPO does so in each training_step; gc_steps is migrated to torch_empty_cache_steps."""
    path = tmp_path / "run.yaml"
    path.write_text(f"base_model: any\nsequence_len: 512\nmicro_batch_size: 1\ndatasets: []\nbf16: true\n{words}")
    training = load(path, MODEL).training

    assert (training.empty_cache_steps, training.empty_cache_when) == (steps, when)


QLORA = {"load_in_4bit": True, "use_peft": True}


@pytest.mark.parametrize(
    ("fields", "framework", "dtype", "recipe"),
    [
        ({}, "sft", "fp32", "amp"),
        ({"dtype": "float32"}, "sft", "fp32", "amp"),
        ({"dtype": "bfloat16"}, "sft", "bf16", "pure"),
        ({}, "trainer", "bf16", "amp"),
        ({"bnb_4bit_compute_dtype": "float16"}, "trainer", "fp16", "amp"),
        ({"bnb_4bit_compute_dtype": "float32"}, "trainer", "fp32", "amp"),
    ],
)
def test_4_bit_layers_multiply_in_the_dtype_of_the_program(
    fields: dict[str, str], framework: str, dtype: str, recipe: str, tmp_path: Path
) -> None:
    """TRL's is that of its weights, fp32 by default; a script around Trainer has its own, of which files may tell."""
    training = read(tmp_path, (*TODAY, f"framework={framework}", "lora.base_dtype=compute"), **QLORA, **fields)

    assert training.qlora is not None
    assert (training.qlora.compute_dtype, training.recipe) == (dtype, recipe)


def test_the_dtype_of_a_scripts_4_bit_layers_is_assumed(tmp_path: Path) -> None:
    path = tmp_path / "arguments.json"
    fields = {"per_device_train_batch_size": 1, "bf16": True, "gradient_checkpointing": True, "max_seq_length": 64}
    path.write_text(json.dumps(fields | QLORA))
    spec = load(path, ("preset=llama-2-7b", *TODAY, "framework=trainer", "data_parallel=1", "lora.base_dtype=compute"))
    (assumed,) = (each for each in memcalc.estimate(spec).spec.origin.assumptions if "compute_dtype" in each.field)

    assert (assumed.taken, assumed.otherwise) == ("fp32", "bf16")
    assert assumed.moved_bytes > 0
