"""Text formats of `check`, by name."""

from __future__ import annotations

import json
from typing import Any

from memcalc.checking.report import CheckReport
from memcalc.text import json_safe
from memcalc.units import Unit

FORMS = ("json", "junit", "github", "sarif", "markdown")


def rendered(report: CheckReport, form: str, unit: Unit) -> str:
    """Return the report in one of FORMS, without a final line break. Sizes in JSON are bytes."""
    match form:
        case "json":
            from memcalc.documents.check import check_document

            return _dumped(check_document(report))
        case "junit":
            from memcalc.report.checks.junit import junit_xml

            return junit_xml(report, unit)
        case "github":
            from memcalc.report.checks.github import github_lines

            return "\n".join(github_lines(report, unit))
        case "sarif":
            from memcalc.report.checks.sarif import sarif_document

            return _dumped(sarif_document(report, unit))
        case _:
            from memcalc.report.checks.table import check_markdown

            return check_markdown(report, unit)


def _dumped(document: Any) -> str:
    return json_safe(json.dumps(document, indent=2))
