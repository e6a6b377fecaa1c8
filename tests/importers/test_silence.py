"""Values that a file leaves open raise an error or make a note: precision, lengths, replicas, and which of two words counts."""

import json
from pathlib import Path
from typing import Any

import pytest

from memcalc.errors import InputError
from memcalc.importers.field_tables import ImportedConfig
from memcalc.importers.loading import import_file, load
from memcalc.spec.spec import Spec

LLAMA = "model_name_or_path: meta-llama/Llama-3.1-8B\nper_device_train_batch_size: 1\n"


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def imported(folder: Path, name: str, text: str) -> ImportedConfig:
    found = import_file(written(folder, name, text))
    assert found is not None
    return found


def spec_of(folder: Path, text: str, *overrides: str) -> Spec:
    return load(written(folder, "run.yaml", text), overrides)


def noted(spec: Spec, words: str) -> bool:
    return any(words in note for note in spec.origin.notes)


CHECKPOINTS = "loaded in the checkpoint's dtype"


TODAY = "versions.transformers=v5.23"


def test_weights_are_loaded_in_the_checkpoints_dtype(tmp_path: Path) -> None:
    """transformers 5, modeling_utils.py: dtype = "auto" where nothing is said. It was fp32, under autocast."""
    ours = spec_of(tmp_path, LLAMA + "bf16: true\n", TODAY)
    assert (ours.training.recipe, ours.training.dtype) == ("pure", "bf16")
    assert not noted(ours, CHECKPOINTS)  # the catalogue says it: bfloat16
    assert noted(
        spec_of(tmp_path, LLAMA.replace("meta-llama/Llama-3.1-8B", "llama-3-8b") + "bf16: true\n", TODAY), CHECKPOINTS
    )

    said = spec_of(tmp_path, LLAMA + "bf16: true\ndtype: float32\n")
    assert said.training.recipe == "amp"
    assert not noted(said, CHECKPOINTS)
    assert spec_of(tmp_path, LLAMA.replace("meta-llama/Llama-3.1-8B", "gpt2") + "bf16: true\n").training.recipe == "amp"
    assert not noted(spec_of(tmp_path, LLAMA + "bf16: true\n", "recipe=amp"), CHECKPOINTS)
    assert spec_of(tmp_path, LLAMA + "bf16: true\nuse_peft: false\n").training.recipe == "amp"  # TRL's own silence
    assert spec_of(tmp_path, LLAMA + "bf16: true\nuse_peft: false\ndtype: auto\n").training.recipe == "pure"


def test_autocast_reads_weights_that_are_published_in_float16(tmp_path: Path) -> None:
    """The catalogue's torch_dtype of pythia; --set recipe= has weights of its own."""
    pythia = LLAMA.replace("meta-llama/Llama-3.1-8B", "EleutherAI/pythia-410m") + "bf16: true\n"
    assert spec_of(tmp_path, pythia, TODAY).training.weight_dtype == "fp16"
    assert spec_of(tmp_path, pythia, TODAY, "recipe=amp").training.weight_dtype is None
    assert spec_of(tmp_path, pythia, "versions.transformers=v4.57").training.weight_dtype is None  # fp32
    lora = spec_of(tmp_path, pythia + "use_peft: true\nlora_r: 8\n", TODAY, "framework=trainer").training
    assert (lora.weight_dtype, lora.recipe) == ("fp16", "amp")
    assert spec_of(tmp_path, LLAMA + "bf16: true\n", TODAY).training.weight_dtype is None


@pytest.mark.parametrize(("key", "dtype", "recipe"), [("dtype", "bfloat16", "pure"), ("torch_dtype", "float32", "amp")])
def test_a_config_json_says_the_checkpoints_dtype(key: str, dtype: str, recipe: str, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, key: dtype}
    config |= {"intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 64}
    (tmp_path / "mine" / "config.json").write_text(json.dumps(config))
    spec = spec_of(tmp_path, "model_name_or_path: mine\nper_device_train_batch_size: 1\nbf16: true\n", TODAY)

    assert spec.training.recipe == recipe
    assert not noted(spec, CHECKPOINTS)


AUTO = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": "auto"}}


def test_a_precision_that_is_auto_must_be_set(tmp_path: Path) -> None:
    """The program decides the precision, so memcalc does not assume one."""
    path = written(tmp_path, "ds.json", json.dumps(AUTO))
    given = ("preset=gpt2", "data_parallel=2")
    with pytest.raises(InputError, match=r"leaves bf16\.enabled and fp16\.enabled to the command line\. .*dtype="):
        load(path, given)

    assert load(path, (*given, "dtype=bf16")).training.recipe == "mixed-16"
    assert load(path, (*given, "dtype=fp32", "recipe=fp32")).training.recipe == "fp32"
    both = written(tmp_path, "fp16.json", json.dumps({**AUTO, "fp16": {"enabled": True}}))
    assert load(both, given).training.dtype == "fp16"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ds.json", json.dumps({**AUTO, "bf16": {"enabled": True}})),
        ("fsdp.yaml", "distributed_type: NO\nmixed_precision: bf16\n"),
        ("run.yaml", LLAMA),
        ("grpo.yaml", LLAMA + "num_generations: 4\n"),
    ],
)
def test_a_length_that_is_not_said_is_missed(name: str, text: str, tmp_path: Path) -> None:
    found = imported(tmp_path, name, text)

    assert "training.sequence_length" in [path for path, _ in found.missing]
    assert any(
        "assuming at most 2,048. Change it with --set sequence_length=" in sentence for sentence in found.sentences()
    )


@pytest.mark.parametrize(
    ("fields", "length"),
    [
        ("block_size: 4096\n", 4096),
        ("model_max_length: 512\n", 512),
        ("num_generations: 4\nmax_prompt_length: 512\nmax_completion_length: 1024\n", 1536),
    ],
)
def test_lengths_by_other_names(fields: str, length: int, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, LLAMA + fields)

    assert spec.training.sequence_length == length
    assert not noted(spec, "tokens of a sequence")


def test_numbers_of_axolotl_that_are_none(tmp_path: Path) -> None:
    """A field that needs a number rejects other values with a message."""
    text = "base_model: x/llama-3-8b\nmicro_batch_size: 1\ndp_shard_size: {a: 1}\ndp_replicate_size: 2\n"
    with pytest.raises(InputError, match="data_parallel"):
        spec_of(tmp_path, text)


ACCELERATE = "distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config: {fsdp_version: 2}\n"
DEGREES = "parallelism_config: {parallelism_config_dp_replicate_size: 2, parallelism_config_dp_shard_size: 4"


@pytest.mark.parametrize(
    ("fields", "data", "replicas"),
    [
        (f"num_processes: 8\n{DEGREES}}}", 8, 2),
        (f"{DEGREES}, parallelism_config_tp_size: 1, parallelism_config_cp_size: 1}}", 8, 2),
        ("num_processes: 16\nnum_machines: 2\nfsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD}", 16, 2),
        ("num_processes: 16\nnum_machines: 2", 16, 1),
    ],
)
def test_replicas_of_accelerate(fields: str, data: int, replicas: int, tmp_path: Path) -> None:
    text = ACCELERATE if "fsdp_config" not in fields else ACCELERATE.replace("fsdp_config: {fsdp_version: 2}\n", "")
    parallelism = spec_of(tmp_path, text + fields, "preset=gpt2").parallelism

    assert (parallelism.data_parallel, parallelism.data_parallel_replicate) == (data, replicas)


def test_other_degrees_of_accelerate_are_no_data_parallelism(tmp_path: Path) -> None:
    found = imported(tmp_path, "a.yaml", f"{ACCELERATE}num_processes: 16\n{DEGREES}, parallelism_config_tp_size: 2}}")

    assert found.blocks["parallelism"] | {"data_parallel": 8, "tensor_parallel": 2} == found.blocks["parallelism"]
    assert found.not_modelled == ()


@pytest.mark.parametrize(
    ("fields", "method"),
    [("", "all-gather"), (", parallelism_config_cp_comm_strategy: alltoall", "ring")],
)
def test_ranks_of_accelerate_that_share_a_sequence(fields: str, method: str, tmp_path: Path) -> None:
    degrees = "parallelism_config: {parallelism_config_cp_size: 2, parallelism_config_dp_shard_size: 4"
    text = f"{ACCELERATE}num_processes: 8\n{degrees}{fields}}}"
    parallelism = spec_of(tmp_path, text, "preset=llama-3-8b").parallelism

    assert (parallelism.data_parallel, parallelism.context_parallel, parallelism.shards) == (4, 2, 8)
    assert parallelism.context_parallel_method == method


def test_deepspeeds_sequence_parallelism_exchanges_heads(tmp_path: Path) -> None:
    degrees = "parallelism_config: {parallelism_config_sp_size: 2, parallelism_config_dp_shard_size: 4}"
    found = imported(tmp_path, "a.yaml", f"{ACCELERATE}num_processes: 8\n{degrees}")
    assert found.blocks["parallelism"]["context_parallel_method"] == "all-to-all"


@pytest.mark.parametrize(
    ("path", "optimizer", "paged"),
    [("AdamW8bit", "adam-8bit", False), ("PagedAdamW8bit", "adam-8bit", True), ("PagedAdamW", "adamw", True)],
)
def test_paged_optimizers_of_litgpt(path: str, optimizer: str, paged: bool, tmp_path: Path) -> None:
    text = "checkpoint_dir: x/Meta-Llama-3-8B\nprecision: bf16-true\ntrain: {micro_batch_size: 1}\n"
    training: Any = spec_of(tmp_path, f"{text}optimizer: {{class_path: bitsandbytes.optim.{path}}}\n").training

    assert (training.optimizer, training.optimizer_options.paged) == (optimizer, paged)


def test_two_names_of_one_field_are_reported(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    text = f"{LLAMA}fp16: true\nfsdp: full_shard\ndeepspeed: {json.dumps(config)}\n"
    spec = spec_of(tmp_path, text, "data_parallel=2")

    assert (spec.training.dtype, spec.parallelism.zero_stage) == ("fp16", 2)
    assert noted(spec, "DeepSpeed's bf16.enabled is true and bf16 is not")
    assert noted(spec, "fsdp is ignored")
    alike = spec_of(tmp_path, text.replace("fp16", "bf16").replace("fsdp: full_shard\n", ""), "data_parallel=2")
    assert not noted(alike, "DeepSpeed's")
