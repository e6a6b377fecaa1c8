"""A command that starts a program: its launcher, the program, and the options of both."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from math import prod
from typing import Any, NamedTuple

from memcalc.errors import InputError
from memcalc.frameworks.draft import DeferredValue
from memcalc.importers.shell.marks import MarkTable, Value, is_open
from memcalc.importers.shell.options import OptionReader, Options
from memcalc.spec.model_families.field_types import shown
from memcalc.units import whole_number

_PYTHON = re.compile(r"python[\d.]*")
_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
}
# Commands of frameworks, each with the subcommands that train.
_TOOLS = {
    "trl": re.compile(r"sft|dpo|kto|grpo|reward"),
    "llamafactory-cli": re.compile("train"),
    "axolotl": re.compile("train|fine-tune"),
    "litgpt": re.compile(r"finetune|finetune_\w+|pretrain"),
    "tune": re.compile("run"),
}
TITANS = "run_train.sh"  # of torchtitan: torchrun --nproc_per_node=${NGPU} -m torchtitan.train
_TITANS_GPUS = 8  # run_train.sh: NGPU=${NGPU:-"8"}
_NAMES = "|".join(("torchrun", "accelerate", "deepspeed", "srun", "python[0-9.]*", *_TOOLS))
_LINE = re.compile(rf"\s*(?:\w+=\S*\s+)*(?:\S*/)?(?:{_NAMES})\s", re.ASCII)
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_TASKS = re.compile(r"(?:-n|--ntasks(?:=|$))(.*)", re.DOTALL)
VISIBLE = "CUDA_VISIBLE_DEVICES"
ENVIRONMENT = (VISIBLE, "NPROC_PER_NODE", "NNODES", "NGPU", "CONFIG_FILE")

Count = int | DeferredValue | None  # a number of GPUs, as the script leaves it open, or unknown


class Command(NamedTuple):
    """A command that starts a program.

    Args:
        launcher: torchrun, accelerate, deepspeed, python, or a framework's command.
        program: a file, a module, or a framework's command with its subcommand.
        launch: options of the launcher.
        words: words of the program before its options.
        options: options of the program.
        environment: the variables of `ENVIRONMENT` that are set.
        tasks: the number of processes that srun starts, as a word; "" without srun.
    """

    launcher: str
    program: str
    launch: Options
    words: tuple[str, ...]
    options: Options
    environment: Mapping[str, Value]
    tasks: str = ""

    def option(self, *names: str) -> str | None:
        """Return the word of the launcher's first of these options; None if it has none of them."""
        found = (self.launch[name] for name in names if name in self.launch)
        return next((words[0] if words else "" for words in found), None)


def is_command_line(word: str) -> bool:
    """Return whether a word is a command line that starts a program, as in `eval "$CMD"`."""
    return _LINE.match(word) is not None


def command_of(words: Sequence[str], environment: Mapping[str, Value], reader: OptionReader) -> Command | None:
    """Return a command's launcher and program; None if it starts no program.

    After `--` a program that submits jobs has the command of the job.
    """
    ends = [at for at, word in enumerate(words) if word == "--"]
    job = command_of(words[ends[-1] + 1 :], environment, reader) if ends else None
    if job is not None:
        return job
    for at, word in enumerate(words):
        name, rest = word.rpartition("/")[2], tuple(words[at + 1 :])
        if name in ("torchrun", "deepspeed"):
            found = _started(name, rest, reader)
        elif name == "accelerate" and rest[:1] == ("launch",):
            found = _started(name, rest[1:], reader)
        elif name in _TOOLS and rest and _TOOLS[name].fullmatch(rest[0]):
            found = _of_tool(name, rest, reader)
        elif name == TITANS:
            found = _of_program("torchrun", TITANS, (), rest, reader)
        elif _PYTHON.fullmatch(name):
            found = _of_python(rest, reader)
        else:
            continue
        if found is None:
            return None
        assigned = {match[1]: match[2] for each in words[:at] if (match := _ASSIGNED.fullmatch(each))}
        return found._replace(environment={**environment, **assigned}, tasks=_tasks(words[:at]))
    return None


def _of_python(rest: tuple[str, ...], reader: OptionReader) -> Command | None:
    rest = rest[len(tuple(takewhile(lambda word: word.startswith("-") and word != "-m", rest))) :]
    if rest[:1] == ("-m",) and len(rest) > 1 and rest[1] in _MODULES:
        return _started(_MODULES[rest[1]], rest[2:], reader)
    return _started("python", rest, reader) if rest[:1] == ("-m",) or (rest[:1] and _is_file(rest[0])) else None


def _started(launcher: str, rest: tuple[str, ...], reader: OptionReader) -> Command | None:
    """Return the command of a launcher and its arguments: options, a program, and the program's arguments."""
    for at, word in enumerate(rest):
        if word in ("-m", "--module") and at + 1 < len(rest):
            return _of_program(launcher, rest[at + 1], rest[:at], rest[at + 2 :], reader)
        if _is_file(word):
            return _of_program(launcher, word, rest[:at], rest[at + 1 :], reader)
    for at, word in enumerate(rest):  # a program that the caller names
        if is_open(word) and not (at and rest[at - 1].startswith("--") and "=" not in rest[at - 1]):
            return _of_program(launcher, word, rest[:at], rest[at + 1 :], reader)
    return None


def _of_tool(name: str, rest: tuple[str, ...], reader: OptionReader) -> Command | None:
    if name != "tune":
        return _of_program(name, f"{name} {rest[0]}", (), rest[1:], reader)
    # torchtune/_cli/run.py: options of torchrun, a recipe, and its options
    for at, word in enumerate(rest[1:], 1):
        if word == "--config" or word.startswith("--config="):
            return _of_program("torchrun", f"tune run {rest[at - 1]}", rest[1 : at - 1], rest[at:], reader)
    return None


def _of_program(
    launcher: str, program: str, launch: Sequence[str], words: tuple[str, ...], reader: OptionReader
) -> Command:
    first = tuple(takewhile(lambda word: not word.startswith("--") and not reader.marks.single_mark(word), words))
    return Command(launcher, program, reader.options(launch), first, reader.options(words[len(first) :]), {})


def _is_file(word: str) -> bool:
    return word.endswith(".py") and not word.startswith("-")


def _tasks(words: Sequence[str]) -> str:
    """Return srun's number of tasks: `-n8`, `-n 8`, `--ntasks=8`; "?" if srun's options do not say."""
    if not any(word.rpartition("/")[2] == "srun" for word in words):
        return ""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        match = _TASKS.fullmatch(word)
        if match:
            return match[1] or following
    return "?"


def gpus_of(command: Command, launch_config: Mapping[str, Any], marks: MarkTable) -> Count:
    """Return the number of processes that a command starts, each on one GPU; None: the machine decides.

    Args:
        command: the command.
        launch_config: the settings of Accelerate's launcher.
        marks: marks of unknown values.

    Raises:
        InputError: a number is not a positive whole number.
    """
    visible = _visible(command, marks)
    if command.launcher == "python":
        return None if command.tasks == "?" else _product(marks, {"ntasks": command.tasks or "1"})
    if command.program == TITANS:
        return _product(marks, {"NGPU": command.environment.get("NGPU", str(_TITANS_GPUS))})
    if command.launcher == "torchrun":
        each = command.option("nproc-per-node") or "1"
        if each in ("auto", "gpu"):
            return visible
        return _product(marks, {"nproc_per_node": each, "nnodes": command.option("nnodes") or "1"})
    if command.launcher == "deepspeed":
        included = command.option("include")
        if included and not is_open(included):  # "host1:0,1@host2:0,1"
            return sum(node.partition(":")[2].count(",") + 1 for node in included.split("@")) or None
        one = command.option("num-gpus")
        return (
            visible
            if one is None
            else _product(marks, {"num_gpus": one, "num_nodes": command.option("num-nodes") or "1"})
        )
    if command.launcher == "llamafactory-cli" and "NPROC_PER_NODE" in command.environment:
        return _product(marks, {name: command.environment.get(name, "1") for name in ("NPROC_PER_NODE", "NNODES")})
    named = launch_config.get("num_processes")
    return visible if named is None else _product(marks, {"num_processes": named})


def visible_gpus(command: Command, marks: MarkTable) -> int:
    """Return the number of GPUs in CUDA_VISIBLE_DEVICES; 0 if it is not set, or not known."""
    found = _visible(command, marks)
    return found if type(found) is int else 0


def _visible(command: Command, marks: MarkTable) -> Count:
    named = command.environment.get(VISIBLE)
    if named is None or not isinstance(named, str):
        return None
    if is_open(named):
        return DeferredValue(f"{VISIBLE}={marks.shown(named)}")
    return len([device for device in named.split(",") if device.strip()]) or None


def _product(marks: MarkTable, named: Mapping[str, Any]) -> Count:
    factors = []
    for name, value in named.items():
        text = value if isinstance(value, str) else str(value)
        if is_open(text):
            return DeferredValue(f"{name} {marks.shown(text)}")
        number = whole_number(text)
        if number is None or number < 1:
            raise InputError(
                f"{name} = {shown(text)} is not a positive whole number.",
                "Correct the launcher's option, or set the number of GPUs: --set data_parallel=.",
            )
        factors.append(number)
    return prod(factors)
