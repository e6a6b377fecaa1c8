"""Parsing of `--set field=value`: any field of a configuration, overridden on the command line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from memcalc.errors import InputError
from memcalc.spec.fields import find_field, unknown_override
from memcalc.spec.words import is_foreign_name, translated
from memcalc.spec.yaml_source import Path, parse_yaml

_SCALAR = re.compile(r"[+-]?\w[\w.+-]*", re.ASCII)


def parse_overrides(assignments: Iterable[str]) -> dict[Path, Any]:
    """Return `["b=4", "training.recompute=full"]` as values by the full path of their field; the last one wins.

    Raises:
        InputError: an assignment without "=", an unknown field, or a value that is not a YAML scalar or list.
    """
    result: dict[Path, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        name = name.strip()
        where = f"--set {assignment}"[:120]
        if not equals:
            raise InputError("the '=' is missing.", "Write --set field=value, such as --set b=4.", where)
        path = find_field(name)
        word = "" if path is not None else _word(name)
        if path is None and not word:
            raise unknown_override(name, where)
        try:
            value = _scalar(text) if _SCALAR.fullmatch(text) else parse_yaml(text, where).data
        except InputError as error:  # the line number of a one-line text is useless
            raise InputError(error.problem, error.remedy, where) from None
        result |= translated(word, value, where) if path is None else {path: value}
    return result


@lru_cache(maxsize=1024)  # searches set the same values of thousands of runs
def _scalar(text: str) -> Any:
    """Return the value of a text without lists and mappings, which callers could change."""
    return parse_yaml(text, "").data


def _word(name: str) -> str:
    """Return another program's field name without a preceding block name; "" if it is not one."""
    block, dot, rest = name.rpartition(".")
    found = rest if dot else name
    return found if is_foreign_name(found, block if dot else None) else ""


CARD: Path = ("hardware", "gpu")


def reject_two_gpus(gpu: str | None, changes: Iterable[Path]) -> None:
    """Reject a GPU that is given in both ways.

    Raises:
        InputError: both --gpu and --set gpu= are given.
    """
    if gpu is not None and CARD in changes:
        raise InputError("gpu is set twice.", "Keep one of the two.", "--gpu")


def apply_overrides(raw: dict[str, Any], overrides: dict[Path, Any]) -> None:
    """Put the overridden values into the blocks of a configuration (under their full names), in place.

    The value null unsets a field, so that its default is derived again.
    """
    for path, value in overrides.items():
        *outer, field = map(str, path)
        block = raw
        for part in outer:
            inner = block.get(part)
            if not isinstance(inner, dict):
                inner = {}
                if value is not None:
                    block[part] = inner
            block = inner
        if value is None:
            block.pop(field, None)
        else:
            block[field] = value
