"""Megatron-LM arguments in a shell script or an argument file. Nothing is executed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from memcalc.frameworks.draft import DeferredValue
from memcalc.importers.shell.marks import MarkTable, is_open
from memcalc.importers.shell.options import OptionReader
from memcalc.importers.shell.script import Script, read_script
from memcalc.importers.shell.tokens import ShellError

_PROGRAM = re.compile(r"(?:^|[/\s\x01])[\w.-]*(?:train|finetune|sft)[\w-]*\.py\b")
_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "deepspeed")
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # settings that a script exports for the run
_NOT_PLAIN = re.compile(r"\s")


def arguments_of(text: str) -> dict[str, Any]:
    """Return arguments by name: `--num-layers 96 --bf16` -> {"num-layers": 96, "bf16": True}; the last one wins.

    From a script they are the arguments of the training command, with the launcher's numbers of processes and nodes;
    from a file that starts no program, the arguments in it or in its variables. Values that the text does not determine
    (the caller's arguments, the environment, undecided branches) are `DeferredValue`.
    """
    try:
        script = read_script(text, lambda word: bool(_NOT_PLAIN.search(word) and _PROGRAM.search(word)))
        reader = OptionReader(script.marks)
        options = reader.joined([reader.options(words) for words in _runs(script)], "set by other commands")
    except (ShellError, RecursionError):
        return {}
    found = {name: _value(words, script.marks) for name, words in options.items()}
    if "deepspeed" in found:
        found |= _deepspeed_parts(script)
    return found | {name: script.variables[name] for name in _ALLOCATOR if found and _is_plain(script, name)}


def _deepspeed_parts(script: Script) -> dict[str, Any]:
    """Return the name of the training program, and the DeepSpeed config that the script writes; unknown ones omitted.

    Unknown values in the config are omitted.
    """
    programs = {words[at].rpartition("/")[2] for words in script.commands if (at := _program(words)) is not None}
    found: dict[str, Any] = {"program": programs.pop()} if len(programs) == 1 else {}
    for config in script.json_documents():
        found["deepspeed-config"] = config
    return found


def _is_plain(script: Script, name: str) -> bool:
    """Return whether a script sets a variable to a known string."""
    value = script.variables.get(name)
    return isinstance(value, str) and bool(value) and not is_open(value)


def _runs(script: Script) -> list[list[str]]:
    """Return the arguments of each training command; if there is none, arguments without a command."""
    started = [list(_of_launcher(words, place)) for words in script.commands if (place := _program(words)) is not None]
    if started:
        return started
    alone = [list(words) for words in script.commands if words and words[0].startswith("--")]
    if not alone and not any(".py" in word for words in script.commands for word in words):
        values = [value.split() if isinstance(value, str) else list(value) for value in script.variables.values()]
        alone = [words for words in values if _first(words).startswith("--")]
    return [[word for words in alone for word in words]]


def _first(words: Sequence[str]) -> str:
    """Return the first word without an unknown variable."""
    return next((word for word in words if not is_open(word)), "")


def _program(words: Sequence[str]) -> int | None:
    """Return the index of the training program in a command; None if there is none."""
    for place, word in enumerate(words):
        if _PROGRAM.search(word) and not word.startswith("-"):
            return place
    launched = next((place for place, word in enumerate(words) if word.rpartition("/")[2] in _LAUNCHERS), None)
    named = any(".py" in word for word in words)
    if launched is not None and not named and "--num-layers" in words:  # a program with an unresolved name
        return next((place for place in range(launched + 1, len(words)) if is_open(words[place])), None)
    return None


def _of_launcher(words: Sequence[str], program: int) -> Iterator[str]:
    """Yield the options of the launcher and of the program, without those of the command that runs the launcher."""
    launcher = next((place for place in range(program) if words[place].rpartition("/")[2] in _LAUNCHERS), program)
    yield from (word for word in words[launcher + 1 : program] if word != "--")
    yield "--"  # the program ends the launcher's last option
    yield from words[program + 1 :]


def _value(words: Sequence[str], marks: MarkTable) -> Any:
    if any(map(is_open, words)):
        return DeferredValue(" ".join(marks.shown(word) for word in words))
    if not words:
        return True
    return _plain(words[0]) if len(words) == 1 else [_plain(word) for word in words]


def _plain(word: str) -> Any:
    word = word.strip("'\"")
    if re.fullmatch(r"\d[\d_]{0,18}", word):
        return int(word.replace("_", ""))
    if re.fullmatch(r"\d{0,9}\.\d{1,12}", word):
        return float(word)
    return word
