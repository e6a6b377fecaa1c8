"""Parsing of `--vary field=values` into an axis: "1..64", "1..64..8", "none,full,[0,1]", or several with commas."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from math import prod

from memcalc.errors import InputError
from memcalc.spec.yaml_source import parse_yaml
from memcalc.sweeping.arrays import BATCH
from memcalc.sweeping.grid import Grid, Value

MOST_CONFIGURATIONS = 4_000_000  # of one sweep: about 1 GB of results
MOST_STRUCTURES = 50_000  # configurations that differ in more than their batches, about 5 ms each

_RANGE = re.compile(r"([0-9]{1,30})\.\.([0-9]{1,30})(?:\.\.([0-9]{1,30}))?")


def parse_values(texts: Iterable[str]) -> dict[str, list[Value]]:
    """Return the values of each name in some `--vary` strings.

    Raises:
        InputError: a string is not an axis.
    """
    axes: dict[str, list[Value]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        where = f"--vary {text}"[:120]
        if not equals:
            raise InputError("the '=' is missing.", "Write --vary field=values, such as b=1..64.", where)
        if name.strip() in axes:
            raise InputError(f"{name.strip()} is varied twice.", "Give each field one list of values.", where)
        axes[name.strip()] = _values(values, where)
    if not axes:
        raise InputError("nothing is varied.", "Add --vary FIELD=VALUES, e.g. --vary micro_batch_size=1..64.", "--vary")
    return axes


def parse_axes(texts: Iterable[str]) -> Grid:
    """Return the grid of some `--vary` strings.

    Raises:
        InputError: a string is not an axis, a field is unknown, or there are too many configurations.
    """
    axes = parse_values(texts)
    try:
        grid = Grid(axes)
    except InputError as error:
        raise InputError(error.problem, error.remedy, "--vary") from None
    if grid.size > MOST_CONFIGURATIONS:
        raise InputError(
            f"{grid.size:,} configurations are more than {MOST_CONFIGURATIONS:,}.",
            "Vary fewer values, or evaluate the grid in blocks in Python: memcalc.sweeping.blocks.",
            "--vary",
        )
    batches = {f"training.{field}" for field in BATCH}
    structures = prod(len(axis.values) for axis in grid.axes if not batches.issuperset(axis.fields))
    if structures > MOST_STRUCTURES:
        raise InputError(
            f"{structures:,} configurations differ in more than batch and sequence length; the limit is "
            f"{MOST_STRUCTURES:,}.",
            "Vary fewer values of fields other than batch and sequence, e.g. num_layers=8..128..8.",
            "--vary",
        )
    return grid


def _values(text: str, where: str) -> list[Value]:
    found: list[Value] = []
    for word in _words(text):
        match = _RANGE.fullmatch(word.strip())
        if match is None:
            found.append(_scalar(word, where))
            continue
        first, last, step = int(match[1]), int(match[2]), int(match[3] or 1)
        if last < first or not step:
            raise InputError(
                f"{word} has no number.",
                "Write FIRST..LAST or FIRST..LAST..STEP, with FIRST <= LAST and STEP >= 1.",
                where,
            )
        if (last - first) // step >= MOST_CONFIGURATIONS:
            raise InputError(f"{word} has too many numbers.", "Add a step: FIRST..LAST..STEP.", where)
        found += range(first, last + 1, step)
    return list({repr(value): value for value in found}.values())


def _words(text: str) -> Iterator[str]:
    """Yield the parts between commas, ignoring commas in brackets."""
    depth = start = 0
    for number, sign in enumerate(text):
        depth += (sign == "[") - (sign == "]")
        if sign == "," and not depth:
            yield text[start:number]
            start = number + 1
    yield text[start:]


def _scalar(word: str, where: str) -> Value:
    value: Value = None
    try:
        value = parse_yaml(word, where).data
    except InputError as error:
        raise InputError(error.problem, error.remedy, where) from None
    if value is None or value == [] or isinstance(value, dict):
        raise InputError(
            f"{word.strip()!r} is not a value.", "Separate values by commas, e.g. none,selective,full.", where
        )
    return value
