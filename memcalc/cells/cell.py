"""A cell of a grid: what is varied, what is to be run for it, and what was found."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

from memcalc.errors import InputError, NotWritten
from memcalc.sweeping.grid import Value, written

Request = dict[str, Any]  # what `memcalc.cells.child` runs: ready for JSON
Outcome = Literal["measured", "invalid", "failed", "lost"]

MOST_CELLS = 100_000  # of one sweep: days


@dataclass(frozen=True, slots=True)
class Answer:
    """What the run of a cell found. Bytes, of the GPU that holds most; None where nobody knows them.

    Args:
        outcome: "measured"; "invalid": the configuration is; "failed": the program did; "lost": the process that ran
            the cell was killed.
        verdict: "fits", "does-not-fit" or "unknown"; None: no GPU was named, or nothing was measured.
        allocated_bytes: by tensors, at the peak.
        reserved_bytes: by PyTorch's allocator.
        device_bytes: reserved, the context and the communication library.
        headroom_bytes: usable memory of the GPU less device_bytes.
        peak_phase: of the allocated peak; None in a dry run.
        seconds: that the run took.
        reason: why there are no figures, or why they are not all.
    """

    outcome: Outcome
    verdict: str | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    device_bytes: int | None = None
    headroom_bytes: int | None = None
    peak_phase: str | None = None
    seconds: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination of values.

    Args:
        values: of each varied field.
        request: what to run.
        answer: what was found; None: not yet.
    """

    values: Mapping[str, Value]
    request: Request = field(default_factory=dict)
    answer: Answer | None = None

    @property
    def digest(self) -> str:
        """Names the request: equal ones have equal answers."""
        return hashlib.sha256(json.dumps(self.request, sort_keys=True).encode()).hexdigest()

    @property
    def label(self) -> str:
        """The values, for a line of progress."""
        return ", ".join(f"{name}={written(value)}" for name, value in self.values.items())


@dataclass(frozen=True, slots=True)
class Cells:
    """The cells of a sweep that have an answer, in the order of the grid.

    Args:
        name: of what is run.
        by: "trace", "null" or "dry-run".
        fields: what is varied.
        cells: each with its answer.
        used: how many of the answers are of an earlier sweep.
        unkept: why the last answer could not be written, after which no other cell was run; None: all are kept.
    """

    name: str
    by: str
    fields: tuple[str, ...]
    cells: tuple[Cell, ...]
    used: int = 0
    unkept: NotWritten | None = None


def points(axes: Mapping[str, Sequence[Value]]) -> list[dict[str, Value]]:
    """Every combination of the values of some names, the last name running fastest.

    Raises:
        InputError: more than a sweep takes.
    """
    found = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    check_size(len(found))
    return found


def check_size(cells: int) -> None:
    """Refuse a grid that nobody can run.

    Raises:
        InputError: more cells than a sweep takes.
    """
    if cells > MOST_CELLS:
        raise InputError(
            f"{cells:,} cells are more than {MOST_CELLS:,}, each of which takes seconds.", "Vary less.", "--vary"
        )
