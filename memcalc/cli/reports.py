"""`--report FORMAT=FILE` of `check`: reports for machines beside the one on the screen."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from memcalc.errors import InputError
from memcalc.files import write_text
from memcalc.units import Unit

if TYPE_CHECKING:
    from memcalc.checking.report import CheckReport


class Report(NamedTuple):
    """One report to write."""

    form: str
    path: Path


def parse_reports(texts: Iterable[str]) -> list[Report]:
    """ "sarif=memcalc.sarif" as a format and a file.

    Raises:
        InputError: there is no such format, or no file.
    """
    reports = []
    for text in texts:
        from memcalc.report.checks.forms import FORMS

        form, _, name = text.partition("=")
        if form not in FORMS or not name:
            raise InputError(
                "it is no FORMAT=FILE.",
                f"Formats are {', '.join(FORMS)}: --report junit=memcalc.xml.",
                f"--report {text}"[:120],
            )
        reports.append(Report(form, Path(name)))
    return reports


def write_reports(report: CheckReport, wanted: Iterable[Report], unit: Unit) -> None:
    """Write each report to its file."""
    for form, path in wanted:
        from memcalc.report.checks.forms import rendered

        write_text(path, rendered(report, form, unit) + "\n")
