"""Scripts that start a program of Hugging Face's libraries or of a framework: they say what the program's YAML says."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from memcalc.checking.discovery import is_config
from memcalc.cli.app import main
from memcalc.errors import InputError
from memcalc.importers.field_tables import ImportedConfig
from memcalc.importers.loading import import_file, load
from memcalc.spec.spec import Spec
from tests.importers.excerpts import AXOLOTL, TORCHTUNE
from tests.thinning import quick_every

MODEL = "--model_name_or_path meta-llama/Llama-3.2-1B"
SMALL = f"{MODEL} --output_dir out --per_device_train_batch_size 2 --model_max_length 512 --max_steps 9"
YAML = """\
model_name_or_path: meta-llama/Llama-3.2-1B
output_dir: out
per_device_train_batch_size: 2
model_max_length: 512
max_steps: 9
"""
ZERO_3 = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": "auto"}}


def script(folder: Path, text: str, **files: str) -> Path:
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_yaml", ".yaml").replace("_json", ".json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    path = folder / "scripts" / "run.sh"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def imported(path: Path, *overrides: str) -> ImportedConfig:
    found = import_file(path, overrides)
    assert found is not None
    return found


def fields(spec: Spec) -> dict[str, Any]:
    """Return all that decides a run: not the name of its file."""
    return {name: value for name, value in spec.model_dump().items() if name != "name"}


WORDS = [
    ("--bf16 --gradient_checkpointing", "bf16: true\ngradient_checkpointing: true\n"),
    ("--bf16 True --gradient-checkpointing=true --tf32 True", "bf16: true\ngradient_checkpointing: true\ntf32: true\n"),
    ("--fp16=True --optim adamw_bnb_8bit --no_remove_unused_columns", "fp16: true\noptim: adamw_bnb_8bit\n"),
    (
        "--bf16 --fsdp 'full_shard auto_wrap' --fsdp_version 2",
        "bf16: true\nfsdp: full_shard auto_wrap\nfsdp_version: 2\n",
    ),
    (
        """--bf16 --use_peft --lora_r 8 --lora_target_modules q_proj k_proj
        --gradient_checkpointing_kwargs '{"use_reentrant": false}' """.replace("\n", "\\\n"),
        (
            "bf16: true\nuse_peft: true\nlora_r: 8\nlora_target_modules: [q_proj, k_proj]\n"
            "gradient_checkpointing_kwargs: {use_reentrant: false}\n"
        ),
    ),
    ("--bf16 --deepspeed zero3.json", "bf16: true\ndeepspeed: zero3.json\n"),
    ("--bf16 --eval_strategy no --report_to none --learning_rate 2e-5", "bf16: true\neval_strategy: no\n"),
    ("--bf16 --lora_enable True --lora_r 8 --bits 4", "bf16: true\nlora_enable: true\nlora_r: 8\nbits: 4\n"),
]


@pytest.mark.parametrize(("words", "lines"), quick_every(2, WORDS, unpack=True))
def test_the_words_of_a_command_are_those_of_a_yaml(words: str, lines: str, tmp_path: Path) -> None:
    path = script(tmp_path, f"torchrun --nproc_per_node 4 train.py {SMALL} {words}", zero3_json=json.dumps(ZERO_3))
    yaml = tmp_path / "train.yaml"
    yaml.write_text(YAML + lines)

    assert fields(load(path)) == fields(load(yaml, ["data_parallel=4"]))
    ours, theirs = imported(path), imported(yaml, "data_parallel=4")
    assert {row[::2] for row in ours.mapped} == {row[::2] for row in theirs.mapped}
    assert ours.limits == theirs.limits
    assert ours.assumptions == theirs.assumptions


LAUNCHERS = [
    ("torchrun --nproc_per_node 8", 8),
    ("torchrun --nproc-per-node=4 --nnodes=2 --standalone", 8),
    ("torchrun", 1),
    ("CUDA_VISIBLE_DEVICES=0,1,2 torchrun --nproc_per_node gpu", 3),
    ("python -m torch.distributed.run --nproc_per_node 8", 8),
    ("python3 -u -m torch.distributed.launch --nproc_per_node=2 --use_env", 2),
    ("deepspeed --num_gpus 4 --num_nodes 2 --master_port 2000", 8),
    ("deepspeed --include localhost:0,1,2", 3),
    ("deepspeed --include=a:0,1@b:0,1", 4),
    ("accelerate launch --num_processes 16 --num_machines 2", 16),
    ("accelerate launch --multi_gpu --num_processes=2", 2),
    ("python -m accelerate.commands.launch --num_processes 4", 4),
    ("env CUDA_VISIBLE_DEVICES=0,1 accelerate launch", 2),
    ("export CUDA_VISIBLE_DEVICES=4,5; deepspeed", 2),
    ("srun --jobid 3 -n 4 python -u", 4),
    ("GPUS=8; srun --ntasks=${GPUS} python", 8),
    ("#SBATCH --nodes=4\nsrun torchrun --nnodes $SLURM_NNODES --nproc_per_node 8", 32),
    ("nohup python", 1),
    ("uv run python", 1),
    ("python submit.py --gpus 2 -- torchrun --nproc_per_node 2", 2),
    ('ARGS="--nproc_per_node 4 \\\n --nnodes ${NNODES:-2}"\ntorchrun $ARGS', 8),
]


@pytest.mark.parametrize(("launcher", "ranks"), quick_every(4, LAUNCHERS, unpack=True))
def test_a_launcher_says_the_number_of_gpus(launcher: str, ranks: int, tmp_path: Path) -> None:
    path = script(tmp_path, f"{launcher} train.py {SMALL} --bf16 --deepspeed zero3.json", zero3_json=json.dumps(ZERO_3))

    assert load(path).parallelism.data_parallel == ranks
    assert load(path, ["data_parallel=64"]).parallelism.data_parallel == 64
    assert load(path, ["gpus=32"]).parallelism.data_parallel == 32


@pytest.mark.parametrize(
    "launcher",
    ["deepspeed", "torchrun --nproc_per_node $GPUS", "N=$1; torchrun --nnodes $N --nproc_per_node 8", "srun python"],
)
def test_a_number_that_the_machine_decides_is_asked_for(launcher: str, tmp_path: Path) -> None:
    path = script(tmp_path, f"{launcher} train.py {SMALL} --bf16 --deepspeed zero3.json", zero3_json=json.dumps(ZERO_3))

    with pytest.raises(InputError, match="does not set the number of GPUs"):
        load(path)
    assert load(path, ["data_parallel=4"]).parallelism.data_parallel == 4


def test_several_gpus_in_one_process_are_a_limit(tmp_path: Path) -> None:
    path = script(tmp_path, f"CUDA_VISIBLE_DEVICES=0,1 python train.py {SMALL}")

    assert [(limit.feature.partition(" (")[0], limit.holds_memory) for limit in load(path).origin.limits] == [
        ("several GPUs in one process", True)
    ]


FSDP = "fsdp_version: 2\n  fsdp_reshard_after_forward: true\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
ACCELERATE = f"distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\nfsdp_config:\n  {FSDP}"


def test_accelerates_file_sets_ranks_precision_and_sharding(tmp_path: Path) -> None:
    path = script(
        tmp_path, f"accelerate launch --config_file=configs/fsdp.yaml train.py {SMALL}", configs__fsdp_yaml=ACCELERATE
    )
    spec = load(path)
    yaml = tmp_path / "train.yaml"
    block = FSDP.replace("\n  ", "\n  ")
    yaml.write_text(
        f"{YAML}bf16: true\nfsdp: full_shard auto_wrap\nfsdp_config:\n  cpu_ram_efficient_loading: true\n  {block}"
    )

    assert (spec.parallelism.data_parallel, spec.parallelism.zero_stage, spec.parallelism.engine) == (8, 3, "fsdp2")
    assert spec.training.dtype == "bf16"
    assert fields(spec) == fields(load(yaml, ["data_parallel=8"]))
    assert load(path, ["dp=2"]).parallelism.data_parallel == 2


def test_accelerates_deepspeed_block_is_that_of_a_deepspeed_file(tmp_path: Path) -> None:
    block = "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 4\ndeepspeed_config:\n  zero_stage: 2\n"
    text = f"accelerate launch --config_file zero2.yaml train.py {SMALL}"
    config = {"zero_optimization": {"stage": 2}}
    other = tmp_path / "other"
    other.mkdir()
    path = script(tmp_path, text, zero2_yaml=block)
    named = script(
        other, f"torchrun --nproc_per_node 4 train.py {SMALL} --bf16 --deepspeed z.json", z_json=json.dumps(config)
    )

    assert fields(load(path)) == fields(load(named))
    assert load(path).parallelism.zero_stage == 2


def test_options_of_accelerates_launcher_override_its_file(tmp_path: Path) -> None:
    flags = "--num_processes 2 --mixed_precision fp16 --use_deepspeed --zero_stage 3"
    path = script(tmp_path, f"accelerate launch --config_file a.yaml {flags} train.py {SMALL}", a_yaml=ACCELERATE)
    spec = load(path)

    assert (spec.parallelism.data_parallel, spec.parallelism.engine, spec.parallelism.zero_stage) == (2, "deepspeed", 3)
    assert spec.training.dtype == "fp16"


def test_trls_command_names_its_trainer_and_its_accelerate_config(tmp_path: Path) -> None:
    flags = "--accelerate_config zero3 --use_peft --lora_r 16 --max_length 512"
    path = script(tmp_path, f"trl sft {MODEL} --output_dir o --max_steps 4 {flags}")
    spec = load(path, ["versions.trl=1.15.0"])

    assert spec.training.lora is not None
    assert (spec.training.framework, spec.training.finetune, spec.training.lora.rank) == ("sft", "lora", 16)
    assert (spec.parallelism.zero_stage, spec.parallelism.data_parallel) == (3, 8)
    assert "training.framework" not in [each.field for each in spec.origin.assumptions]
    assert load(script(tmp_path, path.read_text().replace("sft", "dpo"))).training.pairs


def test_trls_command_needs_only_a_model(tmp_path: Path) -> None:
    spec = load(script(tmp_path, f"CUDA_VISIBLE_DEVICES=0 trl sft {MODEL} --dataset_name x --use_peft --lora_r 16"))

    assert (spec.training.framework, spec.training.finetune, spec.training.micro_batch_size) == ("sft", "lora", 8)


def test_accelerates_file_beside_a_config_of_axolotl_is_not_modelled(tmp_path: Path) -> None:
    path = script(tmp_path, "accelerate launch --config_file f.yaml -m axolotl.cli.train x.yml", f_yaml=ACCELERATE)
    (tmp_path / "x.yml").write_text(AXOLOTL)

    assert "the Accelerate config of axolotl" in [limit.feature for limit in load(path).origin.limits]


RECIPE = f"{YAML}bf16: true\ngradient_checkpointing: true\nmax_length: 512\nuse_peft: false\n"


@pytest.mark.parametrize("how", ["", "--config "])
def test_a_program_reads_its_file_and_its_options_override_it(how: str, tmp_path: Path) -> None:
    text = f"""
    ACCELERATE_LOG_LEVEL=info accelerate launch --config_file=recipes/zero.yaml \\
        scripts/run_sft.py {how}recipes/sft.yaml --per_device_train_batch_size=4 --use_peft=true
    """
    path = script(tmp_path, text, recipes__sft_yaml=RECIPE, recipes__zero_yaml=ACCELERATE)
    spec = load(path)

    assert (spec.training.micro_batch_size, spec.training.finetune) == (4, "lora")
    assert spec.parallelism.data_parallel == 8


FACTORY = (
    "model_name_or_path: meta-llama/Llama-3.2-1B\nstage: sft\nfinetuning_type: lora\ncutoff_len: 512\nbf16: true\n"
)


@pytest.mark.parametrize(
    "command",
    [
        "CUDA_VISIBLE_DEVICES=0,1 llamafactory-cli train examples/x.yaml per_device_train_batch_size=4",
        "NPROC_PER_NODE=2 FORCE_TORCHRUN=1 llamafactory-cli train examples/x.yaml --per_device_train_batch_size 4",
        (
            "torchrun --nproc_per_node 2 src/train.py --per_device_train_batch_size 4 --stage sft --finetuning_type lora "
            "--cutoff_len 512 --bf16 --model_name_or_path meta-llama/Llama-3.2-1B"
        ),
    ],
)
def test_llama_factory(command: str, tmp_path: Path) -> None:
    path = script(tmp_path, command, examples__x_yaml=FACTORY)
    yaml = tmp_path / "x.yaml"
    yaml.write_text(FACTORY + "per_device_train_batch_size: 4\n")

    assert fields(load(path)) == fields(load(yaml, ["data_parallel=2"]))
    assert imported(path).framework.name == "LLaMA-Factory"


def test_torchtune(tmp_path: Path) -> None:
    command = "tune run --nproc_per_node 4 full_finetune_distributed --config full.yaml batch_size=3 tokenizer.max_seq_len=256"
    path = script(tmp_path, command, full_yaml=TORCHTUNE)
    yaml = tmp_path / "x.yaml"
    yaml.write_text(TORCHTUNE)
    overrides = ["data_parallel=4", "b=3", "s=256"]

    assert fields(load(path)) == fields(load(yaml, overrides))


@pytest.mark.parametrize(
    "command",
    ["axolotl train x.yml --num-processes 4", "accelerate launch --num_processes 4 -m axolotl.cli.train x.yml"],
)
def test_axolotl(command: str, tmp_path: Path) -> None:
    path = script(tmp_path, command)
    for folder in (tmp_path, tmp_path / "scripts"):
        (folder / "x.yml").write_text(AXOLOTL)

    assert fields(load(path)) == fields(load(tmp_path / "x.yml", ["data_parallel=4"]))


LITGPT = "--train.micro_batch_size 2 --train.max_seq_length 256 --precision bf16-true --devices 2"


def test_litgpt(tmp_path: Path) -> None:
    path = script(tmp_path, f"litgpt finetune_lora checkpoints/meta-llama/Llama-3.2-1B {LITGPT} --quantize bnb.nf4")
    spec = load(path)

    assert (spec.training.finetune, spec.training.micro_batch_size, spec.parallelism.data_parallel) == ("qlora", 2, 2)
    assert spec.training.framework == "litgpt"
    full = script(tmp_path, f"litgpt finetune_full meta-llama/Llama-3.2-1B {LITGPT}")
    assert load(full).training.finetune == "full"


TITAN = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\nseq_len = 2048\n'


@pytest.mark.parametrize(
    "command",
    [
        "NGPU=4 CONFIG_FILE=./t.toml ./run_train.sh --training.local_batch_size 2",
        "torchrun --nproc_per_node 4 -m torchtitan.train --job.config_file t.toml --training.local_batch_size=2",
    ],
)
def test_torchtitan(command: str, tmp_path: Path) -> None:
    path = script(tmp_path, command)
    (tmp_path / "t.toml").write_text(TITAN)

    assert fields(load(path)) == fields(load(tmp_path / "t.toml", ["data_parallel=4", "b=2"]))
    parted = load(script(tmp_path, f"{command} --parallelism.tensor_parallel_degree 2"))
    assert (parted.parallelism.tensor_parallel, parted.parallelism.data_parallel) == (2, 2)


def test_qlora_has_the_defaults_of_its_program(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        f"python qlora.py {MODEL} --output_dir o --bf16 --source_max_len 384 --target_max_len 128 --max_steps 9",
    )
    spec = load(path)
    training = spec.training
    assert training.lora is not None
    assert training.qlora is not None

    assert (training.finetune, training.lora.rank, training.sequence_length, training.recompute) == (
        "qlora",
        64,
        512,
        "full",
    )
    assert training.optimizer_options.paged
    assert training.qlora.double_quantization
    assert load(script(tmp_path, f"{path.read_text()} --full_finetune --bits 16")).training.finetune == "full"


def test_a_deepspeed_config_that_the_script_writes(tmp_path: Path) -> None:
    text = f"""
    cat > ds.json <<EOF
    {json.dumps({**ZERO_3, "steps_per_print": 3})}
    EOF
    torchrun --nproc_per_node 4 train.py {SMALL} --bf16 --deepspeed ds.json
    """
    spec = load(script(tmp_path, text.replace("\n    ", "\n")))

    assert (spec.parallelism.zero_stage, spec.parallelism.offload) == (3, "optimizer")


def test_a_missing_deepspeed_config_is_never_certain(tmp_path: Path) -> None:
    path = script(tmp_path, f"torchrun --nproc_per_node 4 train.py {SMALL} --bf16 --deepspeed zero3.json")
    spec = load(path)

    assert spec.parallelism.zero_stage == 3
    assert [limit for limit in spec.origin.limits if limit.holds_memory and limit.overcounts == "all"]


def test_an_fsdp_config_in_a_file(tmp_path: Path) -> None:
    text = f"torchrun --nproc_per_node 4 train.py {SMALL} --bf16 --fsdp full_shard --fsdp_config f.json"
    spec = load(script(tmp_path, text, f_json=json.dumps({"fsdp_version": 2, "activation_checkpointing": True})))

    assert (spec.parallelism.engine, spec.training.recompute) == ("fsdp2", "full")


def test_a_rank_without_a_switch_is_an_open_question(tmp_path: Path) -> None:
    found = imported(script(tmp_path, f"python train.py {SMALL} --lora_r 8"))

    assert found.blocks["training"].get("finetune", "full") == "full"
    assert ("training.finetune", "full") in [(each.field, each.taken) for each in found.assumptions]


def test_the_name_of_a_script_suggests_its_trainer(tmp_path: Path) -> None:
    """Or else pairs of sequences and a reference model were silently left out."""
    text = f"torchrun --nproc_per_node 2 train_dpo.py {SMALL} --bf16 --gradient_checkpointing"
    dpo = load(script(tmp_path, text))
    assert (dpo.training.framework, dpo.training.pairs, dpo.training.reference_model) == ("dpo", True, True)

    limits = load(script(tmp_path, text.replace("_dpo", "/ppo"))).origin.limits
    assert any(limit.holds_memory and "ppo" in limit.feature for limit in limits)


def test_commands_with_other_words_for_the_same_memory_are_one(tmp_path: Path) -> None:
    text = f"for seed in 1 2; do python train.py {SMALL} --seed 1; done\npython train.py {SMALL} --seed 2 --learning_rate 1"

    assert load(script(tmp_path, text)).training.micro_batch_size == 2


def test_a_pasted_command_is_read_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    command = f"torchrun --nproc_per_node 2 train.py {SMALL} --bf16\n".encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(command)))

    assert load("-").parallelism.data_parallel == 2


def test_words_of_a_shell_around_a_command(tmp_path: Path) -> None:
    text = f"""
    torchrun --nproc_per_node 2 train.py {SMALL} \\
        `# precision` \\
        --bf16 \\
        > >(tee out.log) 2> >(tee err.log >&2)
    """
    spec = load(script(tmp_path, text))

    assert (spec.training.dtype, spec.parallelism.data_parallel) == ("bf16", 2)


MESSAGES = [
    (
        f"python stage1.py {SMALL}\npython stage2.py {SMALL} --per_device_train_batch_size 4 --bf16",
        (
            "the script starts 2 trainings (stage1.py, stage2.py) that differ in per_device_train_batch_size, bf16. Copy the "
            "command of one of them to a file, and name that."
        ),
    ),
    (
        f"accelerate launch --config_file configs/none.yaml train.py {SMALL}",
        (
            "the Accelerate config configs/none.yaml is not in the script's directory or one above. Correct the path in the "
            "script, or put the file there."
        ),
    ),
    (
        "llamafactory-cli train $1.yaml",
        (
            "the config $1.yaml is not in the script's directory or one above. Correct the path in the script, or put the file "
            "there."
        ),
    ),
    (
        "tune run full_finetune_single_device --config llama3_1/8B_full",
        (
            "the config llama3_1/8B_full is not in the script's directory or one above. Copy it with "
            "`tune cp llama3_1/8B_full .` and name the copy."
        ),
    ),
    (
        f"torchrun --nproc_per_node eight train.py {SMALL}",
        (
            "nproc_per_node = 'eight' is not a positive whole number. Correct the launcher's option, or set the number of "
            "GPUs: --set data_parallel=."
        ),
    ),
    (
        f"accelerate launch train.py {SMALL} --with_tracking",
        (
            "train.py has a training loop of its own (--with_tracking), not Trainer's. Describe the run in YAML with "
            "training.framework: accelerate, or run it without a GPU: `memcalc dry-run --gpu GPU -- COMMAND`."
        ),
    ),
    (
        f"torchrun --nproc_per_node 2 train.py {SMALL} --deepspeed $DS",
        (
            "the Hugging Face TrainingArguments config leaves deepspeed to the command line. Add "
            "--set parallelism.zero_stage= with your values."
        ),
    ),
    (
        "python train.py --model gpt2 --epochs 3",
        (
            "no command of the file starts a training that memcalc can read. Name a script that starts a program with the "
            "arguments of transformers' Trainer or TRL, of another framework, or of Megatron-LM. For another program's "
            "command: `memcalc dry-run --gpu GPU -- COMMAND`."
        ),
    ),
]


@pytest.mark.parametrize(("text", "message"), MESSAGES)
def test_errors_name_value_rule_and_remedy(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = script(tmp_path, text).relative_to(tmp_path)

    assert main(["estimate", str(path)]) == 2
    assert " ".join(capsys.readouterr().err.split()) == f"error: {path}: {message}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"torchrun train.py {SMALL}", True),
        (f"python merge.py {MODEL} --output_dir x", False),
        ("python -m vllm.entrypoints.api_server --model x", False),
        (f"python qlora.py {SMALL} --do_train False", False),
        (f"python scripts/llama_pro.py {MODEL} --output_dir x --num_expand 8", False),
    ],
)
def test_which_scripts_are_trainings(text: str, expected: bool, tmp_path: Path) -> None:
    path = script(tmp_path, text)

    assert (import_file(path) is not None) is expected
    assert is_config(str(path)) is (expected or "per_device" in text)  # by their marks alone
