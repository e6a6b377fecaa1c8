"""How long `memcalc check` takes: over many configs, with one broken among them, and over one, beside `estimate`.

The configs all differ: our own YAML over several presets, files of axolotl, TrainingArguments, torchtune and
torchtitan, and Hugging Face config.json files. One of nine needs nearly all of its GPU, so that no bound decides. The
commands for one config take turns, so that other programs on the machine slow both equally.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

MEMCALC = [sys.executable, "-m", "memcalc"]
PRESETS = ("gpt2", "gpt3", "llama-3-8b", "llama-3-70b", "mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3")
CLOSE_PRESETS = {"llama-3-8b": 2, "mistral-7b": 3, "qwen2.5-7b": 2}  # with micro-batches that nearly fill the GPU
NEAR = 0.1  # of the GPU's usable memory
LARGEST = 16  # micro-batch
BROKEN = "model:\n  num_layers: 2\n  hiden_size: 64\n"


def own(number: int) -> tuple[str, str]:
    """One of our own files."""
    b, s = number % LARGEST + 1, 256 + number
    sharded = "parallelism: {data_parallel: 8, zero_stage: 3}\n" if number % 2 else ""
    preset = PRESETS[number % len(PRESETS)]
    return f"{number}.yaml", f"preset: {preset}\ntraining: {{b: {b}, s: {min(s, 1024)}, recipe: mixed-16}}\n{sharded}"


def close(number: int) -> tuple[str, str]:
    """One of our own files, within NEAR of its GPU."""
    preset, b = sorted(CLOSE_PRESETS.items())[number % len(CLOSE_PRESETS)]
    return f"{number}.yaml", f"preset: {preset}\ntraining: {{b: {b}, s: {850 + number // 2}, recipe: pure}}\n"


def axolotl(number: int) -> tuple[str, str]:
    """A fine-tuning of axolotl's."""
    head = "base_model: meta-llama/Llama-3.1-8B\nadapter: lora\nlora_target_linear: true\nbf16: auto\n"
    return f"{number}.yml", f"{head}sequence_len: {256 + number}\nmicro_batch_size: {number % LARGEST + 1}\n"


def trainer(number: int) -> tuple[str, str]:
    """TrainingArguments."""
    head = "model_name_or_path: mistralai/Mistral-7B-v0.1\nbf16: true\ngradient_checkpointing: true\n"
    return (
        f"{number}.yaml",
        f"{head}max_seq_length: {256 + number}\nper_device_train_batch_size: {number % LARGEST + 1}\n",
    )


def torchtune(number: int) -> tuple[str, str]:
    """A recipe of torchtune's."""
    head = "model: {_component_: torchtune.models.llama3_2.llama3_2_1b}\noptimizer: {_component_: torch.optim.AdamW}\n"
    return (
        f"{number}.yaml",
        f"{head}dtype: bf16\ntokenizer: {{max_seq_len: {256 + number}}}\nbatch_size: {number % LARGEST + 1}\n",
    )


def torchtitan(number: int) -> tuple[str, str]:
    """A job of torchtitan's."""
    text = f"""[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = {number % LARGEST + 1}
seq_len = {256 + number}\n[parallelism]\ndata_parallel_shard_degree = 8\n"""
    return f"{number}.toml", text


def config_json(number: int) -> tuple[str, str]:
    """A model of Hugging Face's."""
    sizes = {"hidden_size": 128 * (number % LARGEST + 1), "num_hidden_layers": 2 + number % 30}
    rest = {"model_type": "llama", "num_attention_heads": 16, "vocab_size": 32000, "intermediate_size": 64 + number}
    return f"{number}-config.json", json.dumps(rest | sizes)


KINDS = (own, own, own, axolotl, trainer, torchtune, torchtitan, config_json, close)


def write(folder: Path, count: int) -> None:
    """`count` configs, no two identical, and a broken one in their midst."""
    for number in range(count):
        name, text = KINDS[number % len(KINDS)](number)
        (folder / name).write_text(text)
    (folder / f"{count // 2}-broken.yaml").write_text(BROKEN)


class Took(NamedTuple):
    """Seconds of one run of a command; those of the processors depend little on what else the machine does."""

    wall: float
    processors: float


def took(command: Sequence[str], code: int = 0) -> Took:
    """How long a command runs that is to end with `code`."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    assert process.returncode == code, f"{command} ended with {process.returncode}"
    return Took(wall, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--runs", type=int, default=15)
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, options.count)
        check = [*MEMCALC, "check", name, "--gpu", "h100-80gb"]
        output = subprocess.run([*check, "--format", "json"], capture_output=True, text=True, check=False).stdout
        sized = [config for config in json.loads(output)["configs"] if config["needed_bytes"] is not None]
        near = [config for config in sized if abs(config["needed_bytes"] / config["limit_bytes"] - 1) <= NEAR]
        print(f"{len(sized)} configs and a broken one; {len(near)} within {NEAR:.0%} of their GPU")
        for jobs in (["--jobs", "1"], []):
            found = [took([*check, *jobs], 2) for _ in range(options.rounds)]
            wall, processors = (statistics.median(column) for column in zip(*found, strict=True))
            words = " ".join(jobs) or "one process a core"
            print(f"{words:20} {wall:6.2f} s, {processors:.2f} s of processors  (medians of {options.rounds})")

    one = ["llama-3-8b", "--gpu", "h200"]
    commands = {verb: [*MEMCALC, verb, *one] for verb in ("estimate", "check")}
    for command in commands.values():
        took(command, int("check" in command))  # bytecode and disk caches; the config is too large, as check says
    turns = [{verb: took(line, int(verb == "check")) for verb, line in commands.items()} for _ in range(options.runs)]
    for verb in commands:
        wall = statistics.median(turn[verb].wall for turn in turns)
        processors = statistics.median(turn[verb].processors for turn in turns)
        print(f"memcalc {verb:9} {' '.join(one)}  {wall * 1000:6.0f} ms, {processors * 1000:.0f} ms of processors")
    for name in Took._fields:
        ratio = statistics.median(getattr(turn["check"], name) / getattr(turn["estimate"], name) for turn in turns)
        print(f"check / estimate {ratio:6.2f}  (median of {options.runs} turns, {name})")


if __name__ == "__main__":
    main()
