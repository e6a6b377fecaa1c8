"""Each framework's configuration in our words. The excerpts are of our own making, after published files."""

from pathlib import Path
from typing import Any

import pytest

from memcalc.errors import InputError
from memcalc.importers.engine import Imported
from memcalc.importers.loading import import_file, load
from memcalc.importers.registry import FRAMEWORKS

AXOLOTL = """\
base_model: NousResearch/Meta-Llama-3.1-8B
plugins:
  - axolotl.integrations.liger.LigerPlugin
liger_rope: true
datasets:
  - path: someone/some-data
    type: alpaca
sequence_len: 4096
wandb_project:
gradient_accumulation_steps: 4
micro_batch_size: 2
optimizer: adamw_torch_fused
learning_rate: 2e-5
bf16: auto
gradient_checkpointing: true
flash_attention: true
fsdp: [full_shard, auto_wrap]
fsdp_config:
  fsdp_offload_params: true
  fsdp_sharding_strategy: FULL_SHARD
a_field_of_tomorrow: 3
"""
QLORA = """\
base_model: someone/llama-3-70b-fp16
load_in_4bit: true
adapter: qlora
lora_r: 16
lora_alpha: 32
lora_target_linear: true
sequence_len: 512
micro_batch_size: 1
optimizer: paged_adamw_8bit
bf16: auto
gradient_checkpointing: true
datasets: []
"""
LLAMA_FACTORY = """\
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: q_proj,v_proj
template: llama3
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
bf16: true
"""
ZERO_3 = """\
model_name_or_path: mistralai/Mistral-7B-v0.1
finetuning_type: full
deepspeed: examples/deepspeed/ds_z3_config.json
cutoff_len: 2048
per_device_train_batch_size: 1
bf16: true
"""
TRAINER = """\
model_name_or_path: mistralai/Mistral-7B-v0.1
torch_dtype: bfloat16
attn_implementation: flash_attention_2
bf16: true
gradient_checkpointing: true
max_seq_length: 2048
per_device_train_batch_size: 16
per_device_eval_batch_size: 8
lora_r: 16
report_to: [wandb]
"""
LITGPT = """\
checkpoint_dir: checkpoints/meta-llama/Meta-Llama-3-8B
precision: bf16-true
quantize: nf4-dq
devices: 1
lora_r: 32
lora_query: true
lora_key: false
lora_value: true
lora_mlp: true
data:
  class_path: litgpt.data.Alpaca2k
train:
  global_batch_size: 8
  micro_batch_size: 1
  max_seq_length: 512
  learning_rate: 0.0002
"""
TORCHTITAN = """\
[model]
name = "llama3"
flavor = "8B"
[optimizer]
name = "AdamW"
lr = 3e-4
[training]
local_batch_size = 1
seq_len = 8192
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 32
tensor_parallel_degree = 1
[activation_checkpoint]
mode = "selective"
selective_ac_option = "2"
"""
MEGATRON = """\
#!/bin/bash
GPUS_PER_NODE=8
NUM_NODES=16
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
CHECKPOINT=$1 #<where> --num-layers 7
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes ${NUM_NODES}
)
MODEL_ARGS="--num-layers 96 --hidden-size 12288 \\
    --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048 --vocab-size 51200"
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py $MODEL_ARGS \\
    --micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 5859375 \\
    --fp16 --use-distributed-optimizer --attention-dropout 0.0 --hidden-dropout 0.0 \\
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 --sequence-parallel \\
    --recompute-granularity selective --lr 6.0e-5 --save $CHECKPOINT
"""
NEMO = """\
name: megatron_gpt
trainer:
  devices: 8
  num_nodes: 2
  precision: bf16
model:
  micro_batch_size: 4
  global_batch_size: 128
  tensor_model_parallel_size: 4
  encoder_seq_length: 512
  max_position_embeddings: ${.encoder_seq_length}
  num_layers: 12
  hidden_size: 768
  ffn_hidden_size: 3072
  num_attention_heads: 12
  activation: fast-swiglu
  bias: false
  kv_channels: null
  megatron_amp_O2: true
  optim:
    name: distributed_fused_adam
    lr: 2e-4
"""
TORCHTUNE = """\
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  max_seq_len: 4096
model:
  _component_: torchtune.models.llama3_1.lora_llama3_1_8b
  lora_attn_modules: ['q_proj', 'v_proj', 'output_proj']
  apply_lora_to_mlp: True
  apply_lora_to_output: False
  lora_rank: 8
  lora_alpha: 16
dataset:
  _component_: torchtune.datasets.alpaca_cleaned_dataset
  packed: False
batch_size: 2
gradient_accumulation_steps: 8
optimizer:
  _component_: bitsandbytes.optim.PagedAdamW8bit
  lr: 3e-4
loss:
  _component_: torchtune.modules.loss.LinearCrossEntropyLoss
enable_activation_checkpointing: True
enable_activation_offloading: True
compile: False
dtype: bf16
"""
TORCHTUNE_FULL = """\
tokenizer: {max_seq_len: 1024}
model: {_component_: torchtune.models.qwen2_5.qwen2_5_7b_instruct}
batch_size: 1
optimizer: {_component_: torch.optim.AdamW, fused: True}
enable_activation_checkpointing: False
dtype: bf16
"""
DEEPSPEED = """\
{"bf16": {"enabled": true},
 "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": true}, "overlap_comm": true},
 "optimizer": {"type": "AdamW", "params": {"lr": 3e-5}},
 "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": "auto", "steps_per_print": 2000}
"""
ACCELERATE = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_reshard_after_forward: true
  fsdp_version: 2
mixed_precision: bf16
num_processes: 8
"""

CASES: dict[str, tuple[str, str, tuple[str, ...], dict[str, Any]]] = {
    "axolotl": (
        "run.yaml",
        AXOLOTL,
        ("data_parallel=8",),
        {
            "training.micro_batch_size": 2,
            "training.sequence_length": 4096,
            "training.gradient_accumulation_steps": 4,
            "training.optimizer": "adamw",
            "training.optimizer_implementation": "fused",
            "training.recompute": "full",
            "training.attention": "flash",
            "training.dtype": "bf16",
            "training.recipe": "mixed-16",  # fp32 shards, gathered in 16 bits
            "training.implementation": "huggingface",
            "parallelism.zero_stage": 3,
            "parallelism.engine": "fsdp2",
            "parallelism.data_parallel": 8,
            "model.hidden_size": 4096,
        },
    ),
    "axolotl QLoRA": (
        "run.yml",
        QLORA,
        (),
        {
            "training.finetune": "qlora",
            "training.lora.rank": 16,
            "training.lora.target_modules": "all-linear",
            "training.optimizer": "adam-8bit",
            "training.recipe": "pure",
            "model.hidden_size": 8192,
        },
    ),
    "LLaMA-Factory": (
        "run.yaml",
        LLAMA_FACTORY,
        (),
        {
            "training.finetune": "lora",
            "training.lora.rank": 8,
            "training.lora.target_modules": ("q_proj", "v_proj"),
            "training.recompute": "full",  # its own default
            "training.gradient_accumulation_steps": 8,
            "training.sequence_length": 2048,
        },
    ),
    "LLaMA-Factory with ZeRO 3": (
        "run.yaml",
        ZERO_3,
        ("data_parallel=8",),
        {"parallelism.zero_stage": 3, "parallelism.engine": "deepspeed", "training.recipe": "mixed-16"},
    ),
    "Hugging Face TrainingArguments": (
        "run.yaml",
        TRAINER,
        (),
        {
            "training.micro_batch_size": 16,
            "training.recipe": "pure",  # weights are loaded in 16 bits and stay so
            "training.finetune": "full",  # lora_r alone makes no adapter
            "training.attention": "flash",
            "model.num_layers": 32,
        },
    ),
    "LitGPT": (
        "run.yaml",
        LITGPT,
        (),
        {
            "training.finetune": "qlora",
            "training.qlora.double_quantization": True,
            "training.lora.rank": 32,
            "training.lora.target_modules": ("q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"),
            "training.gradient_accumulation_steps": 8,
            "training.sequence_length": 512,
        },
    ),
    "torchtitan": (
        "run.toml",
        TORCHTITAN,
        (),
        {
            "parallelism.data_parallel": 64,  # 2 groups of 32
            "parallelism.data_parallel_replicate": 2,
            "parallelism.zero_stage": 3,
            "training.sequence_length": 8192,
            "training.recompute": "every-2",
            "training.optimizer_implementation": "fused",
            "model.vocab_size": 128256,
        },
    ),
    "torchtune": (
        "8B_lora.yaml",
        TORCHTUNE,
        (),
        {
            "model.hidden_size": 4096,
            "model.max_position_embeddings": 8192,  # of llama-3-8b, whose sizes are those of 3.1
            "training.finetune": "lora",
            "training.lora.rank": 8,
            "training.lora.target_modules": ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
            "training.optimizer": "adam-8bit",
            "training.recompute": "full",
            "training.recipe": "pure",
            "training.gradient_accumulation_steps": 8,
            "training.sequence_length": 4096,
        },
    ),
    "torchtune full": (
        "7B_full.yaml",
        TORCHTUNE_FULL,
        ("data_parallel=8",),
        {
            "model.hidden_size": 3584,
            "training.finetune": "full",
            "training.optimizer_implementation": "fused",
            "training.recompute": "none",
            "parallelism.zero_stage": 3,  # as its distributed recipes shard
            "parallelism.engine": "fsdp2",
        },
    ),
    "torchtitan by operator": (
        "8B.toml",
        TORCHTITAN.replace('selective_ac_option = "2"', 'selective_ac_option = "op"'),
        (),
        {
            "training.implementation": "torchtitan",
            "training.recompute": "selective",
            "training.recipe": "amp",  # fp32 shards, gathered in 16 bits
        },
    ),
    "torchtitan with tensor parallelism": (
        "8B.toml",
        TORCHTITAN.replace("tensor_parallel_degree = 1", "tensor_parallel_degree = 2"),
        (),
        {"training.implementation": "plain", "training.recipe": "mixed-16", "parallelism.tensor_parallel": 2},
    ),
    "Megatron-LM": (
        "pretrain.sh",
        MEGATRON,
        (),
        {
            "model.num_layers": 96,
            "model.tie_word_embeddings": True,
            "model.qkv_bias": True,
            "training.dtype": "fp16",
            "training.dropout": 0.0,
            "training.recipe": "mixed-18",
            "training.recompute": "selective",
            "training.gradient_accumulation_steps": 768,  # 1536 sequences over 8 * 16 / (8 * 8) = 2 replicas
            "parallelism.data_parallel": 2,
            "parallelism.tensor_parallel": 8,
            "parallelism.pipeline_parallel": 8,
            "parallelism.sequence_parallel": True,
            "parallelism.zero_stage": 1,
            "parallelism.engine": "megatron",
        },
    ),
    "NeMo": (
        "megatron_gpt_config.yaml",
        NEMO,
        ("vocab_size=50304",),
        {
            "model.max_position_embeddings": 512,  # a reference to another field
            "model.mlp": "swiglu",
            "model.mlp_bias": False,
            "parallelism.data_parallel": 4,  # 8 * 2 / 4
            "parallelism.zero_stage": 1,
            "training.gradient_accumulation_steps": 8,  # 128 / (4 * 4)
        },
    ),
    "DeepSpeed": (
        "ds_config.json",
        DEEPSPEED,
        ("preset=llama-3-8b", "data_parallel=8"),
        {
            "parallelism.zero_stage": 2,
            "parallelism.engine": "deepspeed",
            "training.micro_batch_size": 4,
            "training.recipe": "mixed-16",
            "training.optimizer": "adamw",
        },
    ),
    "Accelerate": (
        "fsdp.yaml",
        ACCELERATE,
        ("preset=llama-3-8b", "b=2"),
        {
            "parallelism.zero_stage": 3,
            "parallelism.engine": "fsdp2",
            "parallelism.data_parallel": 8,
            "training.recompute": "full",
            "training.micro_batch_size": 2,
        },
    ),
}


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def imported(folder: Path, name: str, text: str, *overrides: str) -> Imported:
    found = import_file(written(folder, name, text), overrides)
    assert found is not None
    return found


@pytest.mark.parametrize("case", CASES)
def test_what_it_comes_to(case: str, tmp_path: Path) -> None:
    name, text, overrides, expected = CASES[case]
    spec = load(written(tmp_path, name, text), overrides)
    found = {}
    for path in expected:
        value: Any = spec
        for part in path.split("."):
            value = getattr(value, part)
        found[path] = value

    assert found == expected
    assert spec.name == Path(name).stem
    framework = next(framework.name for framework in FRAMEWORKS if case.startswith(framework.name))
    assert spec.notes[0].startswith(f"read as a configuration of {framework} ")


def test_every_framework_is_tested() -> None:
    assert {framework.name for framework in FRAMEWORKS} <= CASES.keys()


@pytest.mark.parametrize("case", CASES)
def test_no_field_is_dropped(case: str, tmp_path: Path) -> None:
    """Every value of the file is in exactly one of the lists."""
    name, text, overrides, _ = CASES[case]
    found = imported(tmp_path, name, text, *overrides)
    listed = [
        *(path for path, _, _ in found.mapped),
        *(path for path, _ in found.no_effect),
        *(path for path, _ in found.not_modelled),
        *found.unknown,
    ]
    auto = [note for note in found.notes if " is auto: " in note or " is given elsewhere" in note]

    assert len(listed) == len(set(listed))
    assert len(listed) + len(auto) == leaves(name, text)


def leaves(name: str, text: str) -> int:
    """How many values a file has: counted apart from the importer."""
    import json
    import re
    import tomllib

    import yaml

    if name.endswith(".sh"):
        plain = re.sub(r"#.*", "", text)
        return len(set(re.findall(r"(?<!\S)(?:\w+=\")?--([a-z_-]+)", plain)))
    data = (
        json.loads(text)
        if name.endswith(".json")
        else tomllib.loads(text)
        if name.endswith(".toml")
        else yaml.safe_load(text)
    )
    whole = ("fsdp_config",)  # read as one

    def count(value: Any, key: str = "") -> int:
        if isinstance(value, dict) and key not in whole:
            return sum(count(each, inner) for inner, each in value.items())
        return value is not None

    return count(data)


def test_the_lists_of_axolotl(tmp_path: Path) -> None:
    found = imported(tmp_path, "run.yaml", AXOLOTL)

    assert found.unknown == ("a_field_of_tomorrow",)
    assert [path for path, _ in found.not_modelled] == ["liger_rope"]
    assert [path for path, _ in found.no_effect] == ["plugins", "datasets", "learning_rate"]
    assert [path for path, _ in found.missing] == ["parallelism.data_parallel"]
    assert any("offloaded to the host" in note for note in found.notes)


def test_what_is_switched_off_changes_nothing(tmp_path: Path) -> None:
    found = imported(tmp_path, "run.yaml", AXOLOTL.replace("liger_rope: true", "liger_rope: false"))

    assert found.not_modelled == ()
    assert "liger_rope" in [path for path, _ in found.no_effect]


def test_a_run_that_shards_must_say_over_how_many(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"run\.yaml: .* shards \(ZeRO 3\), but not said over how many GPUs"):
        load(written(tmp_path, "run.yaml", AXOLOTL))


def test_sizes_are_asked_for_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"does not hold the model's sizes: vocab_size\. Name the model with --set preset="
    ):
        load(written(tmp_path, "nemo.yaml", NEMO))
    with pytest.raises(InputError, match="sizes: num_layers, hidden_size, num_attention_heads, vocab_size"):
        load(written(tmp_path, "run.yaml", QLORA.replace("llama-3-70b-fp16", "no-such-model")))


def test_a_value_that_matters_and_is_not_known_is_refused_unless_it_is_set(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "run.yaml",
        QLORA.replace("paged_adamw_8bit", "adamw_torch").replace("adapter: qlora", "adapter: galore"),
    )

    with pytest.raises(InputError, match=r"run\.yaml: adapter = 'galore' is no value that memcalc knows of axolotl"):
        load(path)
    assert load(path, ["finetune=lora"]).training.finetune == "lora"


def test_a_config_json_beside_it_is_the_model(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(
        '{"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, '
        '"intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 64}'
    )
    text = TRAINER.replace("mistralai/Mistral-7B-v0.1", "mine").replace("max_seq_length: 2048", "max_seq_length: 64")
    spec = load(written(tmp_path, "run.yaml", text))

    assert (spec.model.num_layers, spec.model.hidden_size) == (3, 64)


def test_a_deepspeed_file_beside_it_is_read(tmp_path: Path) -> None:
    written(tmp_path, "any.json", '{"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}')
    text = ZERO_3.replace("examples/deepspeed/ds_z3_config.json", "any.json")
    found = imported(tmp_path, "run.yaml", text)

    assert found.blocks["parallelism"]["zero_stage"] == 1
    assert "not modelled: offload_optimizer; what is offloaded is counted on the device" in found.notes


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("[q_proj, v_proj]", ("q_proj", "v_proj")),
        ("[self_attn.q_proj, mlp.up_proj, q_proj]", ("q_proj", "up_proj")),
        ("'q_proj, v_proj'", ("q_proj", "v_proj")),
        ("all-linear", "all-linear"),
        (r"'model.language_model.layers.[\d]+.(mlp|self_attn).(up|down|q)_proj'", ("up_proj", "down_proj", "q_proj")),
        (r"'model.layers.\d+.self_attn.(q_proj|o_proj)$'", ("q_proj", "o_proj")),
    ],
)
def test_targets_of_adapters(targets: str, expected: object, tmp_path: Path) -> None:
    """As a list, a text with commas, or one of PEFT's patterns."""
    text = QLORA.replace("lora_target_linear: true", f"lora_target_modules: {targets}")
    lora = load(written(tmp_path, "run.yaml", text)).training.lora

    assert lora is not None
    assert lora.target_modules == expected


def test_a_schedule_without_stages_waits_for_them(tmp_path: Path) -> None:
    text = TORCHTITAN.replace("[activation_checkpoint]", 'pipeline_parallel_schedule = "1F1B"\n[activation_checkpoint]')

    assert load(written(tmp_path, "run.toml", text)).parallelism.pipeline_parallel == 1


def test_recipes_of_torchtune_that_do_not_train_are_not_read(tmp_path: Path) -> None:
    text = "model: {_component_: torchtune.models.llama2.llama2_7b}\nprompt: {user: hello}\n"

    assert import_file(written(tmp_path, "generation.yaml", text)) is None


def test_words_of_fsdp_that_are_none(tmp_path: Path) -> None:
    """A list may hold anything; it is words all the same."""
    path = written(tmp_path, "run.json", '{"per_device_train_batch_size": 1, "fsdp": [null]}')

    assert load(path, ["preset=gpt2", "data_parallel=2"]).parallelism.zero_stage == 3
