"""How Accelerate, Trainer and torchtitan call FSDP: version, mixed-precision policy, units, accumulation."""

from __future__ import annotations

from pathlib import Path

import pytest

from memcalc.importers.loading import load
from memcalc.spec.spec import Spec

MODEL = "preset=llama-3.2-1b"
TRAINER = "per_device_train_batch_size: 1\nbf16: true\nfsdp: full_shard auto_wrap\n"
ACCELERATE = (
    "distributed_type: FSDP\nmixed_precision: {precision}\nnum_processes: 4\nfsdp_config:\n  fsdp_version: {version}\n"
)
TITAN = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = 1024\n[parallelism]\ndata_parallel_shard_degree = 8\n'


def loaded(tmp_path: Path, text: str, *words: str, name: str = "run.yaml") -> Spec:
    path = tmp_path / name
    path.write_text(text)
    return load(path, words)


def sharding(spec: Spec) -> tuple[object, ...]:
    fsdp = spec.parallelism.fsdp
    dtypes = (fsdp.param_dtype, fsdp.reduce_dtype, fsdp.output_dtype)
    return spec.training.recipe, dtypes, fsdp.wrap, fsdp.gradient_sync


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_accelerates_fsdp2_has_a_policy_and_no_autocast(precision: str, tmp_path: Path) -> None:
    """utils/dataclasses.py, set_mixed_precision; accelerator.py, _prepare_fsdp2."""
    text = ACCELERATE.format(precision=precision, version=2)
    spec = loaded(tmp_path, text, MODEL, "s=64", "versions.accelerate=1.15.0")

    assert spec.training.dtype == precision
    assert sharding(spec) == ("fp32", (precision,) * 3, "layers-and-ends", "last")


@pytest.mark.parametrize(("release", "wrap"), [("1.13.0", "layers"), ("1.14.0", "layers-and-ends")])
def test_the_ends_are_units_since_accelerate_1_14(release: str, wrap: str, tmp_path: Path) -> None:
    text = ACCELERATE.format(precision="bf16", version=2)

    assert sharding(loaded(tmp_path, text, MODEL, "s=64", f"versions.accelerate={release}"))[2] == wrap


LAYERS = "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"


def test_fsdp1_has_an_engine_and_runs_under_autocast(tmp_path: Path) -> None:
    """Accelerate's defaults: no prefetch in backward, original parameters (commands/launch.py)."""
    spec = loaded(tmp_path, ACCELERATE.format(precision="bf16", version=1) + LAYERS, MODEL, "s=64")

    assert spec.parallelism.engine == "fsdp1"
    assert sharding(spec) == ("amp", ("bf16", "bf16", None), "layers", "last")
    assert (spec.parallelism.fsdp.backward_prefetch, spec.parallelism.fsdp.use_orig_params) == ("none", True)
    assert not any(limit.holds_memory for limit in spec.origin.limits)
    options = LAYERS + "  fsdp_backward_prefetch: BACKWARD_PRE\n  fsdp_use_orig_params: false\n"
    options += "  fsdp_forward_prefetch: true\n"
    spec = loaded(tmp_path, ACCELERATE.format(precision="bf16", version=1) + options, MODEL, "s=64")
    assert (spec.parallelism.fsdp.backward_prefetch, spec.parallelism.fsdp.use_orig_params) == ("pre", False)
    assert spec.parallelism.fsdp.forward_prefetch
    assert any("the optimizer keeps" in limit.feature for limit in spec.origin.limits if limit.holds_memory)


@pytest.mark.parametrize(
    ("options", "words", "reason"),
    [
        (LAYERS, ("ema=fp32",), "weight averages"),
        (LAYERS, ("recipe=mixed-16",), "master weights"),
        (f"{LAYERS}  fsdp_offload_params: true\n", (), "parameters in host memory"),
        (LAYERS, ("finetune=lora",), "adapters in units with frozen weights"),
    ],
)
def test_what_fsdp1_lacks_is_a_limit_that_holds_memory(
    options: str, words: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    spec = loaded(tmp_path, ACCELERATE.format(precision="bf16", version=1) + options, MODEL, "s=64", *words)

    assert spec.parallelism.engine == "fsdp2"
    assert any(limit.feature == f"FSDP1 with {reason}" and limit.holds_memory for limit in spec.origin.limits)


def test_layers_that_are_no_units_of_fsdp1(tmp_path: Path) -> None:
    """Without a policy the model is one unit; units by size are modelled, but parts of layers that are units are not."""
    file = ACCELERATE.format(precision="bf16", version=1)
    spec = loaded(tmp_path, file, MODEL, "s=64")
    assert (spec.parallelism.engine, spec.parallelism.fsdp.wrap) == ("fsdp1", "model")
    assert not any(limit.holds_memory for limit in spec.origin.limits)

    options = "  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n  fsdp_min_num_params: 20000000\n"
    spec = loaded(tmp_path, file + options, MODEL, "s=64")
    assert (spec.parallelism.fsdp.wrap, spec.parallelism.fsdp.least_unit_parameters) == ("size", 20_000_000)
    assert any(limit.feature == "FSDP1 with units by size" and limit.holds_memory for limit in spec.origin.limits)


def test_zero_grad_of_an_optimizer_that_keeps_whole_parameters_frees_no_gradient(tmp_path: Path) -> None:
    options = LAYERS + "  fsdp_use_orig_params: false\n"
    spec = loaded(tmp_path, ACCELERATE.format(precision="bf16", version=1) + options, MODEL, "s=64")

    assert spec.training.zero_grad == "zero"


def test_fp8_under_fsdp1_is_a_limit_that_holds_memory(tmp_path: Path) -> None:
    spec = loaded(tmp_path, ACCELERATE.format(precision="fp8", version=1) + LAYERS, MODEL, "s=64")

    assert (spec.parallelism.engine, spec.training.fp8) == ("fsdp2", "tensorwise")
    assert any(limit.feature == "FSDP1 with FP8" and limit.holds_memory for limit in spec.origin.limits)


def test_without_mixed_precision_there_is_no_policy(tmp_path: Path) -> None:
    spec = loaded(tmp_path, ACCELERATE.format(precision="no", version=2), MODEL, "s=64", "versions.accelerate=1.15.0")

    assert sharding(spec) == ("fp32", (None, None, None), "layers-and-ends", "last")
    assert spec.training.dtype == "fp32"


@pytest.mark.parametrize(("release", "recipe"), [("5.23.0", "fp32"), ("5.6.0", "amp"), ("4.57.6", "amp")])
def test_trainers_fsdp_is_fsdp2_since_transformers_5_16(release: str, recipe: str, tmp_path: Path) -> None:
    """training_args.py: `fsdp_config.version`, with a default of 1."""
    words = (MODEL, "data_parallel=4", f"versions.transformers={release}", "versions.accelerate=1.15.0")

    assert sharding(loaded(tmp_path, TRAINER, *words))[0] == recipe
    named = loaded(tmp_path, TRAINER + "fsdp_config:\n  fsdp_version: 2\n", *words)
    assert sharding(named)[0] == "fp32"


def test_size_based_wrapping_checkpoints_no_layer_of_fsdp1(tmp_path: Path) -> None:
    text = ACCELERATE + "  fsdp_activation_checkpointing: true\n  fsdp_auto_wrap_policy: {policy}\n"

    def recompute(version: int, policy: str) -> object:
        config = text.format(precision="bf16", version=version, policy=policy)
        return loaded(tmp_path, config, MODEL, "s=64", "versions.accelerate=1.15.0").training.recompute

    assert recompute(1, "SIZE_BASED_WRAP") == "none"
    assert recompute(1, "TRANSFORMER_BASED_WRAP") == recompute(2, "SIZE_BASED_WRAP") == "full"


def test_offloaded_shards_say_that_their_sums_are_counted_as_shards(tmp_path: Path) -> None:
    text = ACCELERATE.format(precision="bf16", version=2) + "  fsdp_offload_params: true\n"
    words = (MODEL, "s=64", "versions.accelerate=1.15.0", "gradient_accumulation_steps=4")
    spec = loaded(tmp_path, text, *words)

    assert spec.parallelism.fsdp.gradient_sync == "each"
    assert "gradients that stay unsharded until the last micro-batch" in {limit.feature for limit in spec.origin.limits}


def test_masters_that_a_user_sets_have_no_policy(tmp_path: Path) -> None:
    text = ACCELERATE.format(precision="bf16", version=2)
    spec = loaded(tmp_path, text, MODEL, "s=64", "versions.accelerate=1.15.0", "recipe=mixed-16")

    assert sharding(spec)[:2] == ("mixed-16", (None, None, None))


@pytest.mark.parametrize(("reduce", "dtype"), [("", "fp32"), ('mixed_precision_reduce = "bfloat16"\n', "bf16")])
def test_torchtitans_policy(reduce: str, dtype: str, tmp_path: Path) -> None:
    """models/llama3/infra/parallelize.py, apply_fsdp; a rank reduces every micro-batch."""
    spec = loaded(tmp_path, TITAN.replace("seq_len = 1024\n", f"seq_len = 1024\n{reduce}"), name="run.toml")

    assert sharding(spec) == ("amp", ("bf16", dtype, None), "layers-and-ends", "each")
    assert spec.training.implementation == "torchtitan"
    split = loaded(tmp_path, TITAN + "tensor_parallel_degree = 2\n", name="run.toml")
    assert sharding(split) == ("amp", ("bf16", "fp32", None), "layers-and-ends", "each")
    assert split.training.implementation == "torchtitan"
    ring = loaded(tmp_path, TITAN + "context_parallel_degree = 2\n", name="run.toml")
    assert sharding(ring) == ("amp", ("bf16", "fp32", None), "layers-and-ends", "each")
    assert ring.training.implementation == "torchtitan"


@pytest.mark.parametrize("flavor", ["0.6B", "14B", "32B"])
def test_torchtitans_qwen3_has_the_published_sizes(flavor: str, tmp_path: Path) -> None:
    text = TITAN.replace('name = "llama3"\nflavor = "8B"', f'name = "qwen3"\nflavor = "{flavor}"')

    assert loaded(tmp_path, text, name="run.toml").model.architecture == "qwen3"


def test_what_a_script_keeps_is_an_assumption_with_its_bytes(tmp_path: Path) -> None:
    """2 bytes of every logit: 64 tokens of 128,256."""
    spec = loaded(tmp_path, ACCELERATE.format(precision="bf16", version=2), MODEL, "s=64", "versions.accelerate=1.15.0")

    assert spec.training.logits_until == "backward"
    found = next(each for each in spec.origin.assumptions if each.field == "training.logits_until")
    assert (found.taken, found.otherwise) == ("backward", "loss")
    assert found.moved_bytes == 2 * 64 * 128256


def test_how_a_script_steps_is_an_assumption(tmp_path: Path) -> None:
    """foreach, PyTorch's default, has temporaries of the whole shard: fused is taken only where a user says so."""
    words = ("preset=llama-3.2-3b", "s=64", "recompute=full", "versions.accelerate=1.15.0")
    text = ACCELERATE.format(precision="bf16", version=2)

    assert loaded(tmp_path, text, *words).training.optimizer_implementation == "foreach"
    fused = loaded(tmp_path, text, *words, "optimizer_implementation=fused")
    assert fused.training.optimizer_implementation == "fused"
    assert loaded(tmp_path, text, *words, "optimizer=sgd").training.optimizer == "sgd"


@pytest.mark.parametrize(("release", "stage"), [("5.3.0", 2), ("5.4.0", 3)])
def test_trainers_fsdp1_ignores_a_strategy(release: str, stage: int, tmp_path: Path) -> None:
    """Since 5.4 it is given as reshard_after_forward, and Accelerate prefers its default, FULL_SHARD."""
    text = TRAINER.replace("full_shard", "shard_grad_op") + "fsdp_config: {fsdp_version: 1}\n"
    spec = loaded(tmp_path, text, MODEL, "s=64", "data_parallel=4", f"versions.transformers={release}")

    assert (spec.parallelism.engine, spec.parallelism.zero_stage) == ("fsdp1", stage)


@pytest.mark.parametrize(("release", "engine"), [("5.9.0", "fsdp1"), ("5.10.1", "fsdp2")])
def test_fsdp_is_fsdp2_since_5_10(release: str, engine: str, tmp_path: Path) -> None:
    spec = loaded(tmp_path, TRAINER, MODEL, "s=64", "data_parallel=4", f"versions.transformers={release}")

    assert spec.parallelism.engine == engine


@pytest.mark.parametrize("version", ["1", None])
def test_trainer_wraps_each_module_that_trains(version: str | None, tmp_path: Path) -> None:
    """transformers 5.23 trainer.py, _prepare_for_training; before 5.10 FSDP is FSDP1 if the file names no version."""
    config = "" if version is None else f"fsdp_config:\n  fsdp_version: {version}\n"
    words = (MODEL, "s=64", "data_parallel=2", "finetune=lora", "versions.transformers=4.57.6")
    spec = loaded(tmp_path, TRAINER + config, *words)

    assert spec.parallelism.engine == "fsdp1"
    assert sharding(spec) == ("amp", ("bf16", "bf16", None), "layers-and-trained", "last")
    assert not any(limit.holds_memory for limit in spec.origin.limits)


def test_accelerates_file_of_a_trainer_has_pefts_policy(tmp_path: Path) -> None:
    """`accelerate launch` sets FSDP_VERSION to 1; a 4-bit base is in the dtype of the other frozen weights."""
    text = ACCELERATE.format(precision="bf16", version=1).replace("  fsdp_version: 1\n", LAYERS)
    spec = loaded(tmp_path, text, MODEL, "s=64", "finetune=qlora", "training.framework=sft")

    assert spec.parallelism.fsdp.wrap == "layers-and-trained"
    assert spec.training.lora is not None
    assert (spec.training.recipe, spec.training.lora.base_dtype) == ("amp", "compute")


def test_trls_adapters_above_4_bits_are_flattened_in_bf16(tmp_path: Path) -> None:
    """trl 1.16 trainer/sft_trainer.py casts them to bf16, Accelerate their chunks to fp32."""
    text = TRAINER + "fsdp_config:\n  fsdp_version: 1\nuse_peft: true\nload_in_4bit: true\n"
    text += "bnb_4bit_quant_storage: bfloat16\ndtype: bfloat16\n"
    spec = loaded(tmp_path, text, MODEL, "s=64", "data_parallel=2", "training.framework=sft")

    assert spec.parallelism.engine == "fsdp1"
    assert (spec.training.recipe, spec.parallelism.fsdp.load_dtype) == ("amp", "bf16")
    assert spec.training.lora is not None
    assert spec.training.lora.adapter_dtype == "fp32"  # of their shards, gradients and optimizer states
