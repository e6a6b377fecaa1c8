"""SARIF 2.1.0 report of `check`, for code scanning.

Source: OASIS, Static Analysis Results Interchange Format (SARIF) Version 2.1.0; each property has its section next to
it where it is not plain from its name.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

from memcalc import __version__
from memcalc.checking.report import CheckOutcome, CheckReport, Status
from memcalc.report.checks.text import RULES, sentence, summary
from memcalc.units import Unit

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_ROOT = "%SRCROOT%"  # 3.4.4: the root of the repository; GitHub replaces it

_EXPLAINED: dict[Status, tuple[str, str]] = {
    "does not fit": (
        "A training run does not fit its GPU",
        "Its worst GPU needs more memory than the GPU or the budget has; `memcalc estimate` shows the components.",
    ),
    "unknown": (
        "memcalc cannot say whether a training run fits its GPU",
        "The limit is inside the range of recorded runs, or a feature that needs memory is not modelled.",
    ),
    "grew": (
        "A training run needs more memory than in the baseline",
        "The peak grew by more than is allowed since the stored result. `memcalc diff` shows where.",
    ),
    "broken": (
        "A configuration is invalid",
        "The message has the value, the rule and the remedy.",
    ),
}


def sarif_document(report: CheckReport, unit: Unit) -> dict[str, Any]:
    """Return the report as one run of the tool."""
    order = list(RULES)
    paths = {_uri(outcome.path): outcome.path for outcome in report.outcomes}  # "./a" and "a" are one artifact
    failing = [outcome for outcome in report.outcomes if report.fails(outcome)]
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": _driver()},
                "invocations": [_invocation(report)],
                "columnKind": "unicodeCodePoints",
                "artifacts": [{"location": _location(path)} for path in paths.values()],
                "results": [_result(outcome, order.index(outcome.status), unit) for outcome in failing],
            }
        ],
    }


def _driver() -> dict[str, Any]:
    return {
        "name": "memcalc",
        "semanticVersion": __version__,
        "rules": [
            {
                "id": name,
                "shortDescription": {"text": _EXPLAINED[status][0]},
                "fullDescription": {"text": _EXPLAINED[status][1]},
                "help": {"text": _EXPLAINED[status][1]},
                "defaultConfiguration": {"level": "error"},
            }
            for status, (name, _) in RULES.items()
        ],
    }


def _invocation(report: CheckReport) -> dict[str, Any]:
    invocation: dict[str, Any] = {"executionSuccessful": report.exit_code != 2, "exitCode": report.exit_code}  # 3.20.14
    notifications: list[dict[str, Any]] = [
        {
            "level": "note",
            "message": {"text": note},
            "locations": [{"physicalLocation": {"artifactLocation": _location(outcome.path)}}],
        }
        for outcome in report.outcomes
        for note in outcome.notes
    ]
    if not report.outcomes and report.exit_code:
        notifications.append({"level": "error", "message": {"text": summary(report)}})
    return invocation | ({"toolExecutionNotifications": notifications} if notifications else {})


def _result(outcome: CheckOutcome, rule: int, unit: Unit) -> dict[str, Any]:
    name = RULES[outcome.status][0]
    return {
        "ruleId": name,
        "ruleIndex": rule,
        "level": "error",
        "message": {"text": sentence(outcome, unit)},
        "locations": [
            {
                "physicalLocation": {
                    "artifactLocation": _location(outcome.path),
                    "region": {"startLine": outcome.line or 1},  # code scanning shows nothing without one
                }
            }
        ],
        # 3.27.17: the same finding in another commit, wherever its line has moved to
        "partialFingerprints": {"memcalcFinding/v1": f"{name}:{_uri(outcome.path)}"},
    }


def _location(path: str) -> dict[str, str]:
    uri = _uri(path)
    return {"uri": uri} if Path(path).is_absolute() else {"uri": uri, "uriBaseId": _ROOT}


def _uri(path: str) -> str:
    if Path(path).is_absolute():
        return Path(path).as_uri()
    return quote(os.fsencode(path.replace(os.sep, "/").removeprefix("./")))
