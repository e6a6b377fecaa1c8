"""The diagnosis of a log as JSON. Bytes are integers, each with the rounding of what was printed."""

from __future__ import annotations

from typing import Any

from memcalc.diagnosis.changes import Explained
from memcalc.diagnosis.diagnosis import Diagnosis, Finding
from memcalc.diagnosis.sizes import Printed
from memcalc.report.change_document import change_document


def diagnosis_document(diagnosis: Diagnosis) -> dict[str, Any]:
    """The whole diagnosis."""
    explained = diagnosis.explained
    return {
        "schema_version": 1,
        "source": "oom",
        "log": diagnosis.log,
        "explained_report": diagnosis.chosen + 1,
        "messages_not_kept": diagnosis.not_kept,
        "harmless_messages": diagnosis.harmless,
        "reports": [_finding(finding) for finding in diagnosis.findings],
        "config": None if explained is None else _explained(explained),
    }


def _finding(finding: Finding) -> dict[str, Any]:
    report, account, cause = finding.report, finding.account, finding.cause
    parts = {
        "live": account.live,
        "private": account.private,
        "cached": account.cached,
        "outside": account.outside,
        "others": account.others,
        "unexplained": account.unexplained,
        "free": account.free,
        "room": account.room,
    }
    return {
        "framework": report.framework,
        "wording": report.wording,
        "line": report.line,
        "count": report.count,
        "speakers": list(report.speakers),
        "device": {"kind": report.kind, "index": report.device},
        "phase": report.phase or None,
        "tensor": report.tensor or None,
        "operator": report.operator or None,
        "advised_setting": report.setting or None,
        "figures": {name: _figure(figure) for name, figure in report.figures.by_name().items()},
        "buffers": {name: _figure(figure) for name, figure in report.figures.buffers},
        "processes": [
            {"pid": holder.pid, **_figure(holder.bytes), "this_process": holder.pid == account.own_pid}
            for holder in report.holders
        ],
        "account": {name: None if figure is None else figure.bytes for name, figure in parts.items()},
        "shortfall_bytes": account.shortfall,
        "cause": cause.name,
        "fragmented": cause.fragmented,
        "checks": [
            {
                "relation": check.relation,
                "holds": check.holds,
                "off_bytes": check.off_bytes,
                "meaning": check.meaning or None,
            }
            for check in finding.checks
        ],
        "advice": [
            {
                "lever": advice.lever,
                "effect": advice.effect,
                "gain_bytes": advice.gain_bytes,
                "enough": advice.enough,
            }
            for advice in finding.advice
        ],
    }


def _figure(figure: Printed) -> dict[str, int]:
    return {"bytes": figure.bytes, "slack_bytes": figure.slack}


def _explained(explained: Explained) -> dict[str, Any]:
    return {
        "name": explained.result.spec.name,
        "phase": explained.phase,
        "allocated_bytes": explained.allocated,
        "components": {component.value: size for component, size in explained.components.items()},
        "held_bytes": explained.held,
        "unexplained_bytes": explained.unexplained,
        "budget_bytes": explained.budget,
        "budget_source": explained.budget_source or None,
        "needed_bytes": explained.needed.bytes,
        "needed_interval": {
            "low_bytes": explained.needed.low_bytes,
            "high_bytes": explained.needed.high_bytes,
            "runs": explained.needed.errors.runs,
            "kind": explained.needed.errors.kind,
            "replayed": explained.needed.errors.replayed,
        },
        "changes": [
            {
                **change_document(change),
                "allocated_bytes": change.allocated,
                "saved_bytes": change.saved,
                "needed_bytes": change.needed,
                "fits": change.fits,
            }
            for change in explained.changes
        ],
        "notes": list(explained.notes),
    }
