"""Text formats of `check`, by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from memcalc.checking.report import CheckReport
from memcalc.text import json_safe
from memcalc.units import Unit

FORMS = ("json", "junit", "github", "sarif", "markdown")


def rendered(report: CheckReport, form: str, unit: Unit) -> str:
    """Return the report in one of FORMS, without a final line break."""
    return _RENDERERS[form](report, unit)


def _json(report: CheckReport, unit: Unit) -> str:  # noqa: ARG001 - JSON has bytes
    from memcalc.documents.check import check_document

    return _dumped(check_document(report))


def _junit(report: CheckReport, unit: Unit) -> str:
    from memcalc.report.checks.junit import junit_xml

    return junit_xml(report, unit)


def _github(report: CheckReport, unit: Unit) -> str:
    from memcalc.report.checks.github import github_lines

    return "\n".join(github_lines(report, unit))


def _sarif(report: CheckReport, unit: Unit) -> str:
    from memcalc.report.checks.sarif import sarif_document

    return _dumped(sarif_document(report, unit))


def _markdown(report: CheckReport, unit: Unit) -> str:
    from memcalc.report.checks.table import check_markdown

    return check_markdown(report, unit)


def _dumped(document: Any) -> str:
    return json_safe(json.dumps(document, indent=2))


_RENDERERS: dict[str, Callable[[CheckReport, Unit], str]] = {
    "json": _json,
    "junit": _junit,
    "github": _github,
    "sarif": _sarif,
    "markdown": _markdown,
}
