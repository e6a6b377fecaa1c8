"""`--report FORMAT=FILE` of `check`: reports in files, in addition to the screen."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from memcalc.errors import InputError
from memcalc.files import write_text
from memcalc.text import harmless
from memcalc.units import Unit

if TYPE_CHECKING:
    from memcalc.checking.report import CheckReport


class ReportFile(NamedTuple):
    """One report to write."""

    form: str
    path: Path


def parse_reports(texts: Iterable[str]) -> list[ReportFile]:
    """ "sarif=memcalc.sarif" as a format and a file.

    Raises:
        InputError: there is no such format, or no file.
    """
    reports = []
    for text in texts:
        from memcalc.report.checks.formats import FORMS

        form, _, name = text.partition("=")
        if form not in FORMS or not name:
            raise InputError(
                f"{form!r} is not a format." if form not in FORMS else "the file is missing.",
                f"Write FORMAT=FILE, e.g. --report junit=memcalc.xml; formats are {', '.join(FORMS)}.",
                f"--report {text}"[:120],
            )
        reports.append(ReportFile(form, Path(name)))
    return reports


def write_reports(report: CheckReport, wanted: Iterable[ReportFile], unit: Unit) -> None:
    """Write each report to its file."""
    for form, path in wanted:
        from memcalc.report.checks.formats import rendered

        write_text(path, rendered(report, form, unit) + "\n")


MOST_SHOWN = 50  # errors on standard error; the report has them all


def print_invalid(report: CheckReport, *, also_drawn: bool) -> None:
    """Print what makes the exit code 2 as errors, one line each.

    Args:
        report: the report, which is on standard output.
        also_drawn: whether that is a terminal where the same errors have just been drawn.
    """
    from memcalc.cli.messages import show_error
    from memcalc.report.checks.text import place, summary

    if also_drawn or report.exit_code != InputError.exit_code:
        return
    broken = [outcome for outcome in report.outcomes if outcome.status == "broken"]
    for outcome in broken[:MOST_SHOWN]:
        show_error(harmless(f"{place(outcome)}: {outcome.message}"))
    if len(broken) > MOST_SHOWN:
        show_error(f"{len(broken) - MOST_SHOWN:,} more configurations are invalid; see the report.")
    if not broken:
        show_error(summary(report))
