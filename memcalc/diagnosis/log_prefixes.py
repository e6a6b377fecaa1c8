"""Log prefixes: times, levels, ranks and hosts that loggers and launchers print before a message."""

from __future__ import annotations

import re
from typing import NamedTuple

_LONGEST_PREFIX = 400  # characters
_MOST_UNITS = 12

_ANSI = re.compile(
    r"\x1b(?:\[[0-?]{0,32}[ -/]{0,4}[@-~]|\][^\x07\x1b]{0,256}(?:\x07|\x1b\\)?|[@-Z\\^_])"
    r"|\\(?:u001b|x1b|033)\[[\d;]{0,32}m",  # as in JSON and repr()
    re.IGNORECASE,
)

# Prefixes of a message, one unit at a time. Every branch is bounded, and branches start differently enough that a line
# is read once.
_UNIT = re.compile(
    r"""\s*(?:
      \[(?P<kind>rank|default|worker|node|stage|gpu)[ -]?(?P<rank>\d{1,6})\]:?         # torchrun, torch.distributed
    | \[\d{1,6},(?P<mpi>\d{1,6})\](?:<std(?:err|out)>)?:?                             # mpirun --tag-output
    | \[(?P<index>\d{1,6})\]:                                                         # mpiexec -l
    | (?P<task>\d{1,6}):[ \t]                                                         # srun --label
    | \([\w.-]{0,60}\ ?pid=(?P<pid>\d{1,10})[^)]{0,60}\)                              # Ray, vLLM
    | (?P<host>(?=[\w.-]{0,60}\d)[A-Za-z][\w.-]{0,60}):[ \t]                          # pdsh, DeepSpeed's launcher
    | \[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?\]?:?  # ISO times
    | \[?\d\d[/-]\d\d(?:[/-]\d{2,4})?[ ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?\]?:?
    | \[?\d\d:\d\d:\d\d(?:[.,]\d{1,9})?\]?:?
    | [IWEF]\d{4}[ ]\d\d:\d\d:\d\d\.\d{1,9}\s{1,8}\d{1,10}                             # glog
    | \[?(?:INFO|WARNING|WARN|ERROR|CRITICAL|FATAL|DEBUG|TRACE)\]?[:|-]?(?=\s|\[|\|)
    | [IWEF](?=\s)
    | \[?[\w./\\:-]{1,200}\.(?:cc|cpp|cu|h|py):\d{1,6}(?::\w{1,60})?\]:?
    | -(?=\s)
    | [>|│┃]
    )""",
    re.VERBOSE | re.ASCII,
)

_WORDS = {"rank": "rank", "default": "rank", "worker": "worker", "node": "node", "stage": "stage", "gpu": "GPU"}
_BOX = " \t│┃|"


class PrefixedLine(NamedTuple):
    """A line split into its source and its text."""

    source: str  # "rank 3", "process 90", "node07"; empty if the line has no source
    text: str  # without the prefix


def without_colors(text: str) -> str:
    """Return the text without terminal control sequences."""
    return _ANSI.sub("", text) if "\x1b" in text or "[" in text else text


def split_prefix(text: str) -> PrefixedLine:
    """Return the source and the text of a line without colors."""
    at, names = 0, []
    for _ in range(_MOST_UNITS):
        unit = _UNIT.match(text, at, at + _LONGEST_PREFIX)
        if unit is None or unit.end() == at:
            break
        at = unit.end()
        name = _name(unit)
        if name:
            names.append(name)
    return PrefixedLine(", ".join(dict.fromkeys(names)), text[at:])


def _name(unit: re.Match[str]) -> str:
    if unit["rank"] is not None:
        return f"{_WORDS[unit['kind']]} {int(unit['rank'])}"
    for group, word in (("mpi", "rank"), ("index", "rank"), ("task", "task"), ("pid", "process")):
        if unit[group] is not None:
            return f"{word} {int(unit[group])}"
    return unit["host"] or ""


def squeezed(text: str) -> str:
    """Return the text without whitespace, so that line breaks by a terminal or a logger do not matter."""
    return "".join(text.replace("\\n", " ").replace("\\t", " ").strip(_BOX).split())
