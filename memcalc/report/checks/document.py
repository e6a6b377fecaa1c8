"""JSON report of `check`, which `--baseline` reads."""

from __future__ import annotations

from typing import Any

from memcalc.checking.baseline import VERSION
from memcalc.checking.report import CheckReport, Growth, Outcome


def check_document(report: CheckReport) -> dict[str, Any]:
    """The report as JSON."""
    return {
        "schema_version": VERSION,
        "exit_code": report.exit_code,
        "budget_bytes": report.budget_bytes,
        "skipped": report.skipped,
        "configs": [_config(outcome) for outcome in report.outcomes],
        "gone": list(report.gone),
        "remarks": list(report.remarks),
    }


def _config(outcome: Outcome) -> dict[str, Any]:
    sizes = outcome.sizes
    return {
        "path": outcome.path,
        "status": outcome.status,
        "name": None if sizes is None else sizes.name,
        "gpu": None if sizes is None else sizes.gpu,
        "needed_bytes": outcome.needed_bytes,
        "basis": outcome.basis or None,
        "is_bound": outcome.is_bound,
        "interval": _interval(outcome.interval),
        "not_modelled": list(outcome.unmodelled),
        "limit_bytes": outcome.limit_bytes,
        "limit": outcome.limit or None,
        "margin_bytes": None if sizes is None else outcome.margin_bytes,
        "allocated_bytes": None if sizes is None else sizes.allocated,
        "reserved_bytes": None if sizes is None else sizes.reserved,
        "device_bytes": None if sizes is None else sizes.device,
        "peak_phase": None if sizes is None else sizes.peak_phase,
        "rank": None if sizes is None else sizes.rank,
        "change": None if outcome.growth is None else _change(outcome.growth),
        "message": outcome.message or None,
        "line": outcome.line,
        "notes": list(outcome.notes),
    }


def _interval(found: tuple[int, int] | None) -> dict[str, int] | None:
    return None if found is None else {"low_bytes": found[0], "high_bytes": found[1]}


def _change(growth: Growth) -> dict[str, int | None]:
    return {
        "baseline_bytes": growth.baseline,
        "difference_bytes": growth.difference,
        "allowed_bytes": growth.allowed,
    }
