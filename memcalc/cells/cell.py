"""A cell of a grid: the varied values, the run requested for them, and its answer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

from memcalc.errors import InputError, NotWritten
from memcalc.ledger import verdict as verdicts
from memcalc.sweeping.grid import Value, written

Request = dict[str, Any]  # input of `memcalc.cells.child`, ready for JSON
Outcome = Literal["measured", "invalid", "failed", "lost"]
By = Literal["trace", "null", "dry-run"]

MOST_CELLS = 100_000  # of one sweep; this number would take days


@dataclass(frozen=True, slots=True)
class CellResult:
    """Result of a cell's run. Bytes of the GPU with the highest peak; None if unknown."""

    # "measured"; "invalid": the configuration is invalid; "failed": the program failed; "lost": the process that ran
    # the cell was killed
    outcome: Outcome
    # "fits", "does-not-fit" or "unknown"; None: no GPU was given, or nothing was measured
    verdict: verdicts.Answer | None = None
    allocated_bytes: int | None = None  # bytes of tensors at the peak
    reserved_bytes: int | None = None  # bytes reserved by the PyTorch allocator
    device_bytes: int | None = None  # reserved memory, the CUDA context and the communication library
    headroom_bytes: int | None = None  # usable memory of the GPU minus device_bytes
    peak_phase: str | None = None  # phase of the allocated peak; None in a dry run
    seconds: float = 0.0  # duration of the run
    reason: str = ""  # why all or some of the figures are missing


@dataclass(frozen=True, slots=True)
class GridCell:
    """One combination of values."""

    values: Mapping[str, Value]  # the value of each varied field
    request: Request = field(default_factory=dict)  # the run to make
    answer: CellResult | None = None  # its result; None: not run yet

    @property
    def digest(self) -> str:
        """Hash of the request: cells with equal requests have equal answers."""
        return hashlib.sha256(json.dumps(self.request, sort_keys=True).encode()).hexdigest()

    @property
    def label(self) -> str:
        """The values, for a line of progress."""
        return ", ".join(f"{name}={written(value)}" for name, value in self.values.items())


@dataclass(frozen=True, slots=True)
class GridCells:
    """The cells of a sweep that have an answer, in the order of the grid.

    Args:
        name: name of the swept run.
        by: what runs the cells: a trace on fake tensors, a trace on the null device, or a dry run.
        fields: the varied fields.
        cells: the cells, each with its answer.
        used: number of answers taken from an earlier sweep.
        unkept: why the last answer could not be written, which ended the sweep; None: all answers are kept.
    """

    name: str
    by: By
    fields: tuple[str, ...]
    cells: tuple[GridCell, ...]
    used: int = 0
    unkept: NotWritten | None = None


def points(axes: Mapping[str, Sequence[Value]]) -> list[dict[str, Value]]:
    """Return every combination of the values of some names, the last name changing fastest.

    Raises:
        InputError: there are more than `MOST_CELLS`.
    """
    found = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    check_size(len(found))
    return found


def check_size(cells: int) -> None:
    """Check that a grid is small enough to run.

    Raises:
        InputError: there are more than `MOST_CELLS`.
    """
    if cells > MOST_CELLS:
        raise InputError(
            f"{cells:,} cells exceed the limit of {MOST_CELLS:,}, each of which takes seconds.",
            "Vary fewer values.",
            "--vary",
        )
