"""Errors of estimates for recorded runs, by kind: memcalc/data/recorded_errors.json.

The file is generated from the raw records by tools/recorded_errors.py; docs/explanations/verdict.md shows it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from memcalc.ledger.verdict import RecordedErrors
from memcalc.verdict.run_types import COMPILED, GENERATION

FILE = Path(__file__).parents[1] / "data" / "recorded_errors.json"

# Number of runs from which on a kind's own figures are used, instead of the next wider kind's: 20 for the central 95 %
# of errors to be meaningful, 10 for a full range.
ENOUGH, ENOUGH_FOR_A_RANGE = 20, 10
UNRECORDED = 0.1  # allowed error on both sides for a kind without records


def replay_errors(kinds: Iterable[str], *, compiled: bool = False) -> RecordedErrors:
    """Return the errors of allocator replays, relative to the replay's reserved memory.

    The interval is the central 95 % of the errors of the first kind that has ENOUGH runs. Replays are of eager
    execution: the interval of a compiled run is wider by that of recorded compiled runs.
    """
    errors = _replay_errors(tuple(kinds))
    return _widened(errors) if compiled else errors


def compiled_errors() -> RecordedErrors:
    """Return the errors of replaying eager execution in place of compiled runs; the interval is their full range."""
    return _errors_of(COMPILED, _table()["compiled"], replayed=False)


def _replay_errors(names: tuple[str, ...]) -> RecordedErrors:
    table: dict[str, dict[str, Any]] = _table()["replayed"]
    for run_type in names:
        found = table.get(run_type)
        if found is not None and found["runs"] >= ENOUGH:
            return _errors_of(run_type, found, replayed=True)
    return _unrecorded(names[0], replayed=True)


def _errors_of(run_type: str, found: dict[str, Any], *, replayed: bool) -> RecordedErrors:
    """Return an entry of the file as errors of a type of runs; their interval always contains 0."""
    low, high = min(found["low"], 0.0), max(found["high"], 0.0)
    return RecordedErrors(run_type, found["runs"], found["median"], found["worst"], low, high, replayed)


def _widened(errors: RecordedErrors) -> RecordedErrors:
    """Return the errors of compiled runs, with an interval that also holds the errors of eager execution."""
    by = compiled_errors()
    low, high = ((1 + one) * (1 + other) - 1 for one, other in ((errors.low, by.low), (errors.high, by.high)))
    return by._replace(low=low, high=high)


def reserve_ratio(kinds: Iterable[str], *, compiled: bool = False) -> tuple[float, RecordedErrors]:
    """Return the ratio of reserved to allocated memory of recorded runs, for runs that cannot be replayed.

    Returns:
        The median ratio, and the errors around it: the full recorded range. A kind with fewer than ENOUGH_FOR_A_RANGE
        runs uses the next wider one. That of a compiled run is wider by the replay errors of recorded compiled runs.
    """
    ratio, errors = _reserve_ratio(tuple(kinds))
    if compiled:
        errors = _widened(errors)
    return ratio, errors


def _reserve_ratio(names: tuple[str, ...]) -> tuple[float, RecordedErrors]:
    table: dict[str, dict[str, Any]] = _table()["reserved over allocated"]
    for run_type in names:
        found = table.get(run_type)
        if found is not None and found["runs"] >= ENOUGH_FOR_A_RANGE:
            middle = found["median"]
            low, high = found["least"] / middle - 1, found["most"] / middle - 1
            worst = max(low, high, key=abs)
            return middle, RecordedErrors(run_type, found["runs"], found["spread"], worst, low, high, replayed=False)
    every = table[""]  # all runs
    middle = (table.get(GENERATION, every) if names[0].startswith(GENERATION) else every)["median"]
    return middle, _unrecorded(names[0], replayed=False)


def _unrecorded(run_type: str, *, replayed: bool) -> RecordedErrors:
    return RecordedErrors(run_type, 0, 0.0, 0.0, -UNRECORDED, UNRECORDED, replayed)


@cache
def _table() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found
