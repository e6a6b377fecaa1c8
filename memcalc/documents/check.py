"""The documents of `check`, which `--baseline` reads, and of `diff`. Bytes; null where a run has no such quantity."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from typing_extensions import TypedDict

from memcalc.checking.baseline import VERSION
from memcalc.checking.comparison import Comparison, ComparisonLine
from memcalc.checking.report import CheckOutcome, CheckReport, PeakGrowth, Status
from memcalc.documents.shared import filled
from memcalc.ledger.result import Result


class Change(TypedDict):
    """A peak and its change from the baseline."""

    baseline_bytes: int
    difference_bytes: int
    allowed_bytes: int | None
    """null: any growth"""


class CheckedInterval(TypedDict):
    """Interval of device memory from recorded runs."""

    low_bytes: int
    high_bytes: int


class CheckedConfig(TypedDict):
    """One config: checked, or invalid with a message and without sizes."""

    path: str
    status: Status
    name: str | None
    gpu: str | None
    """the GPU of the verdict, by its name in `memcalc gpus`"""
    needed_bytes: int | None
    """device bytes if a GPU is known, else reserved, else allocated"""
    basis: str | None
    """which of the three: device, reserved, allocated"""
    is_bound: bool
    """whether needed_bytes is a lower bound, which alone is beyond the limit"""
    interval: CheckedInterval | None
    """null if bounds decided"""
    not_modelled: list[str]
    """features of the run that need memory and are not modelled"""
    limit_bytes: int | None
    """the smaller of GPU and budget, less the margin"""
    limit: str | None
    """what sets the limit, as text"""
    margin_bytes: int | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    device_bytes: int | None
    peak_phase: str | None
    rank: dict[str, int] | None
    change: Change | None
    """null: no baseline, or none of this configuration"""
    message: str | None
    """what is wrong with an invalid configuration"""
    line: int | None
    """where in the file, if that is known"""
    notes: list[str]
    """how another framework's file was read, what of it is not counted or assumed"""


class CheckDocument(TypedDict):
    """Output of `memcalc check --format json`, and input of --baseline."""

    schema_version: int
    exit_code: int
    budget_bytes: int | None
    """--budget, the limit of all configurations"""
    skipped: int
    """files that are not configurations"""
    configs: list[CheckedConfig]
    gone: list[str]
    """configurations of the baseline that were not checked"""
    remarks: list[str]
    """links to directories that were not followed, rules that match nothing"""


def check_document(report: CheckReport) -> CheckDocument:
    """Return the document of a report."""
    return {
        "schema_version": VERSION,
        "exit_code": report.exit_code,
        "budget_bytes": report.budget_bytes,
        "skipped": report.skipped,
        "configs": [_config(outcome) for outcome in report.outcomes],
        "gone": list(report.missing),
        "remarks": list(report.remarks),
    }


def _config(outcome: CheckOutcome) -> CheckedConfig:
    sizes = outcome.sizes
    return filled(
        CheckedConfig,
        outcome,
        name=None if sizes is None else sizes.name,
        gpu=None if sizes is None else sizes.gpu,
        basis=outcome.basis or None,
        interval=_interval(outcome.interval),
        not_modelled=list(outcome.unmodelled),
        limit=outcome.limit or None,
        margin_bytes=None if sizes is None else outcome.margin_bytes,
        allocated_bytes=None if sizes is None else sizes.allocated,
        reserved_bytes=None if sizes is None else sizes.reserved,
        device_bytes=None if sizes is None else sizes.device,
        peak_phase=None if sizes is None else sizes.peak_phase,
        rank=None if sizes is None else sizes.rank,
        change=None if outcome.growth is None else _change(outcome.growth),
        message=outcome.message or None,
    )


def _interval(found: tuple[int, int] | None) -> CheckedInterval | None:
    return None if found is None else {"low_bytes": found[0], "high_bytes": found[1]}


def _change(growth: PeakGrowth) -> Change:
    return {
        "baseline_bytes": growth.baseline,
        "difference_bytes": growth.difference,
        "allowed_bytes": growth.allowed,
    }


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
