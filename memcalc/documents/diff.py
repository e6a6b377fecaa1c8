"""The document of `diff`. Bytes; null where a run has no such quantity."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from typing_extensions import TypedDict

from memcalc.checking.comparison import Comparison, ComparisonLine
from memcalc.documents.shared import filled
from memcalc.ledger.result import Result


class DiffRun(TypedDict):
    """One of the two runs."""

    name: str
    peak_phase: str
    fits: bool | None


class DiffLine(TypedDict):
    """One quantity of both runs, and the difference B minus A."""

    a: int | None
    b: int | None
    difference: int | None


class DiffDocument(TypedDict):
    """The document that `diff --format json` prints."""

    schema_version: Literal[1]
    a: DiffRun
    b: DiffRun
    components: dict[str, DiffLine]
    totals: dict[str, DiffLine]
    phases: dict[str, DiffLine]


def difference_document(difference: Comparison) -> DiffDocument:
    """Return the document of a comparison of two runs."""
    return {
        "schema_version": 1,
        "a": _run(difference.a),
        "b": _run(difference.b),
        "components": _lines(difference.components),
        "totals": _lines(difference.totals),
        "phases": _lines(difference.phases),
    }


def _run(result: Result) -> DiffRun:
    return {"name": result.spec.name, "peak_phase": result.ledger.peak_phase, "fits": result.fits}


def _lines(lines: Iterable[ComparisonLine]) -> dict[str, DiffLine]:
    return {line.name: filled(DiffLine, line) for line in lines}
