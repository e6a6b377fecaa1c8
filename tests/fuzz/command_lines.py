"""Command lines made at random from the commands' own options: `command_line(rng, command)` gives one."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from memcalc.cli.tree import command_tree

# Formats of tests/fuzz/formats.py with whole files that the lines name.
FILES = ("config", "hf config", "chain", "events", "snapshot", "log", "settings", "baseline")
# Commands that run nobody's program. Only `replay` loads torch here, of a configuration as small as TINY: the trace of
# a large model takes a minute, shows its progress, and ends at Ctrl-C (test_endings.py).
COMMANDS = "estimate fit sweep recompute replay oom check diff models gpus schema".split()
_WITH_TORCH = {"--measure", "--device", "--verify", "--python", "--trace"}
# Searches of this many seconds are bounded, and long: tests/fuzz has thousands of lines. `--by` runs a grid of TINY.
_SLOW = {"--maximize", "--minimize", "--replay", "--sweep", "--compare", "--jobs", "--by"}
_TOGETHER = {"--write": ("--as", ("axolotl", "trainer", "deepspeed", "torchtitan", "megatron", "accelerate", "nope"))}

HOSTILE = (
    "", " ", "-", "--", "-1", "0", "1e400", "NaN", "inf", "-inf", "9" * 5_000, "x" * 5_000, "2**63", "\x1b[31mred\x1b[0m",
    "\x1b]0;owned\x07", "\u202eevil", "a\nb", "\n::error::owned", "##[command]owned", "\x00", "\ud800", "\uff15", "1_000",
    "0x10", "1..1e9", "1..9999999999", "1..9..0", "1..9..-1", ",", "=", "==", "a=", "=1", "a.b.c=1", "b=[", "b={", "b=*x",
    "b=!!python/name:os.system", "b=1\n  s: 2", "training=4", "model=4", "name=\x1b[1m", "../../../etc/passwd",
    "/dev/zero", "/dev/full", "/proc/self/mem", "/", ".", "missing/folder/file.json", "file.unknown", "~", "$(id)", "`id`",
    "<script>alert(1)</script>", "100%", "-5%", "1e9%", "5 apples", "12", "12GiB", "0GiB", "-1GiB", "1e30GiB", "12gb", "12 G",
)  # fmt: skip
CONFIGS = (
    *("gpt2 llama-3-8b run.yaml".split() * 8),
    *"gpt2 gpt3 gpt3.yaml llama-3-8b mixtral-8x7b deepseek-v3 codegen-350m Qwen/Qwen3-0.6B chain.yaml run.yaml".split(),
    *"config.json events.jsonl train.log snapshot.pickle main.json memcalc.toml folder pipe nope meta-llama/Nope-8B".split(),
    *"https://huggingface.co/gpt2 model.py:Net model.py".split(),
)
OVERRIDES = (
    *"b=4 s=512 l=2 zero_stage=3 data_parallel=8 t=2 p=2 recompute=full recompute=every-2 dtype=fp16 engine=fsdp2".split(),
    *"optimizer=muon finetune=lora lora.rank=8 inference.batch=4 attention=eager loss=fused micro_batch_size=2".split(),
    *"b=4294967296 s=9223372036854775807 num_layers=2000000 d=1 h=0 V=1e6 gradient_checkpointing=true bf16=true".split(),
    *"num_hidden_layers=3 per_device_train_batch_size=2 alloc_conf=expandable_segments:True hardware.gpu=t4".split(),
)
_NEEDED = {"sweep": ("--vary=b=1..4",), "check": ("--gpu=h100-80gb",), "fit": ("--gpu=a100-80gb", "--gpus=4")}
TINY = """\
model: {num_layers: 1, hidden_size: 32, num_attention_heads: 2, vocab_size: 64, max_position_embeddings: 64}
training: {micro_batch_size: 1, sequence_length: 8, attention: eager}
"""
GPUS = "h100-80gb 4090 a100 H100 t4 auto mi300x v100 nope".split()
# By what stands for an option's value in the help.
_VALUES: dict[str, Sequence[str]] = {
    "CARD": GPUS,
    "SIZE": "12GiB 80GB 1 0 1TiB 79.1GiB".split(),
    "N": "1 2 3 8 64 0 -1 1000003 4294967296".split(),
    "FIELD=VALUE": OVERRIDES,
    "FIELD=VALUES": "b=1..4 b=1,2,4 s=128..512..128 recompute=none,full num_layers=1..20 zero_stage=0..3 l=1..2000000".split(),
    "FIELD": "tensor_parallel b zero_stage engine nope".split(),
    "FILE": "out.json out.csv out.html out.svg out out.yaml folder pipe run.yaml main.json".split(),
    "FORMAT=FILE": "json=out.json sarif=out.sarif nope=out github=- markdown=folder".split(),
    "SETTINGS": ("expandable_segments:True", "max_split_size_mb:64", "max_split_size_mb:-1", "nope:1", ":", "a:b,c:d"),
    "SHARE|SIZE": "5% 2GiB 0 100% 1000%".split(),
    "[RANK]": "8 0 64 1000000".split(),
    "[HOW]": "full selective every-2 every-0 0-3".split(),
    "N,N,...": "5,10,15 0 -1 1,1 99 a".split(),
    "NAME": "adamw adam-8bit sgd muon nope".split(),
    "GBIT": "400 0 1e-300".split(),
    "SHARE": "0.5 0 1 2 -1".split(),
    "X.Y": "2.13 2.0 9.9 a".split(),
}


def command_line(rng: random.Random, command: str) -> list[str]:
    """The command with its arguments and some of its options, of which a few have values that nothing should have."""
    words = [command, *_NEEDED.get(command, ())]
    options, arguments = _parameters(command)
    if command == "sweep" and rng.random() < 0.03:
        words = [
            command,
            "--by",
            rng.choice(("trace", "trace", "null", "dry-run", *HOSTILE)),
            "--vary=b=1,2",
            "tiny.yaml",
        ]
        options = [option for option in options if "--vary" not in option.opts]
        arguments = []
    for name, variadic in arguments:
        words += [_argument(rng, name) for _ in range(rng.choice((1, 1, 2)) if variadic else 1)]
    for option in rng.sample(options, min(len(options), rng.choice((0, 1, 1, 2, 3, 5)))):
        name = rng.choice(option.opts)
        if option.is_flag:
            words.append(name)
        elif name.startswith("--") and rng.random() < 0.5:
            words.append(f"{name}={_value(rng, option)}")
        else:
            words += [name, _value(rng, option)]
        if name in _TOGETHER and rng.random() < 0.8:
            other, values = _TOGETHER[name]
            words += [other, rng.choice(values)]
    if rng.random() < 0.05:
        words.insert(rng.randrange(1, len(words) + 1), rng.choice(HOSTILE))
    return words


def _argument(rng: random.Random, name: str) -> str:
    if name == "source":
        return rng.choice(("events.jsonl", "snapshot.pickle", "train.log", "missing.pickle", "pipe", "tiny.yaml"))
    if rng.random() < 0.05:
        return rng.choice(HOSTILE)
    if name == "log" and rng.random() < 0.7:
        return "train.log"
    if name == "document":
        return rng.choice(("config", "result", "nope"))
    if name == "query":
        return rng.choice((*"llama 8b qwen3 mistral zzz".split() * 5, *HOSTILE))
    return rng.choice(CONFIGS)


def _value(rng: random.Random, option: Any) -> str:
    if rng.random() < 0.1:
        return rng.choice(HOSTILE)
    choices = re.findall(r"'([^']+)'", str(option.bare_type()))  # of a Literal
    if choices:
        return str(rng.choice(choices))
    known = _VALUES.get(option.metavar or "")
    return rng.choice(known or _VALUES["N"])


@cache
def _parameters(command: str) -> tuple[list[Any], list[tuple[str, bool]]]:
    """The options of a command, and the names of its arguments with whether there may be several."""
    options, arguments = [], []
    for parameter in command_tree().get_command(None, command).params:
        if parameter.param_type_name == "argument":
            arguments.append((parameter.name, parameter.nargs == -1))
        elif not {*parameter.opts} & (_WITH_TORCH | _SLOW):
            options.append(parameter)
    return options, arguments
