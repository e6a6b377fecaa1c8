"""Forty ways in which a user may name fields, GPUs, models and commands at first: accepted, or led to what was meant."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Run

ACCEPTED = [
    "estimate gpt2 --set batch_size=4",
    "estimate gpt2 --set per_device_train_batch_size=4",
    "estimate gpt2 --set gradient_checkpointing=true",
    "estimate gpt2 --set num_hidden_layers=6",
    "estimate gpt2 --set seq_len=512",
    "estimate gpt2 --set optim=adamw_8bit",
    "estimate gpt2 --set bf16=true",
    "estimate gpt2 --set lora_r=16",
    "estimate gpt2 --set load_in_4bit=true",
    "estimate gpt2 --set tp=2",
    "estimate gpt2 --set fsdp=full_shard --set world_size=2",
    "estimate gpt2 --set offload_optimizer=cpu --set zero=2 --set dp=2",
    "estimate gpt2 --gpu 4090",
    "estimate gpt2 --gpu H100",
    "estimate gpt2 --gpu RTX4090",
    "estimate gpt2 --set gpu=a100-80",
    "estimate gpt2 -b 4 --lora --budget 12GiB",
    "estimate gpt2 -n 8 --fsdp --recompute",
    "estimate meta-llama/Llama-3.2-1B",
    "estimate qwen/qwen3-0.6b --gpu t4 --qlora",
    "fit gpt2 --budget 8GiB",
    "models llama 3.1",
]
CORRECTED = {
    "estimate gpt2 --set lr=1e-4": "Leave lr out: the field has no effect on memory.",
    "estimate gpt2 --set train_batch_size=8": "error: --set train_batch_size=8: unknown field 'train_batch_size'. Set global_batch_size (DeepSpeed's train_batch_size), or micro_batch_size for one GPU.\n",
    "estimate gpt2 --set deepspeed=ds.json": "Name the DeepSpeed file as CONFIG, or set zero_stage.",
    "estimate gpt2 --batch-size 4": "Fields are set with --set: --set batch_size=VALUE.",
    "estimate gpt2 --tensor-parallel 2": "Fields are set with --set: --set tensor_parallel=VALUE.",
    "estimate gpt2 b=4": "Fields are set with --set: --set b=4.",
    "estimate gpt2 --gpu a100": "sold with 40 or 80 GB of memory. Write a100-40gb or a100-80gb.",
    "estimate gpt2 --gpu 8xH100": "Write --gpu H100 --gpus 8.",
    "estimate gpt2 --gpu h1000": "Nearest: h100-80gb",
    "estimate qwen3-32b": "Did you mean Qwen/Qwen3-32B ",
    "estimate gpt3-175b": "Did you mean gpt3?",
    "estimate llama3": "Did you mean llama-3-70b or llama-3-8b?",
    "estimate llama-3.1-8b": "Did you mean meta-llama/Llama-3.1-8B ",
    "estimate https://huggingface.co/Qwen/Qwen3-8B": "Write the model's hub id: Qwen/Qwen3-8B.",
    "explain gpt2": "Try `memcalc estimate CONFIG --explain [COMPONENT]`.",
    "presets": "Try `memcalc models [QUERY]`.",
    "cards": "Try `memcalc gpus`.",
    "estimate gpt2 --set explain=1": "Use the option --explain [COMPONENT].",
}


@pytest.mark.parametrize("line", ACCEPTED)
def test_a_first_guess_is_accepted(line: str, run: Callable[..., Run]) -> None:
    done = run(*line.split())

    assert done.err == ""
    assert done.code == 0


@pytest.mark.parametrize("line", CORRECTED)
def test_a_first_guess_leads_to_what_was_meant(line: str, run: Callable[..., Run]) -> None:
    done = run(*line.split())

    assert (done.code, done.out) == (2, "")
    assert CORRECTED[line] in done.err


def test_files_are_guessed_too(run: Callable[..., Run], tmp_path: Path) -> None:
    named = tmp_path / "named.yaml"
    named.write_text("model: llama-3-8b\ntraining: {batch_size: 2, gradient_checkpointing: true}\n")
    assert run("estimate", str(named)).code == 0
    unet = tmp_path / "config.json"
    unet.write_text('{"_class_name": "UNet2DConditionModel", "sample_size": 64, "in_channels": 4}')

    assert (
        f"error: {unet}: _class_name: memcalc has no formulas for 'UNet2DConditionModel', a model of diffusers. "
        "Run its real step: pip install 'torch>=2.6' 'nvidia-ml-py>=12.535' 'transformers>=4.51' 'diffusers>=0.35', "
        "then `memcalc trace`.\n" in run("estimate", str(unet)).err
    )


def test_there_are_forty() -> None:
    assert len(ACCEPTED) + len(CORRECTED) == 40


# Of ninety further guesses, those that led elsewhere at first.
FURTHER = {
    "estimate gpt2 --set context_window=512": "Did you mean context_length?",
    "estimate gpt2 --set fsdp_sharding_strategy=FULL_SHARD": "Did you mean fsdp?",
    "estimate gpt2 --set sharding=full": "Set zero_stage (3 shards",
    "estimate --model gpt2": "Write the value as the argument, without an option.",
    "models --search llama": "Write the value as the argument, without an option.",
}


@pytest.mark.parametrize("line", FURTHER)
def test_a_further_guess_leads_to_what_was_meant(line: str, run: Callable[..., Run]) -> None:
    done = run(*line.split())

    assert (done.code, done.out) == (2, "")
    assert FURTHER[line] in done.err
