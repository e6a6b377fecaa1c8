"""The report of `check`: a table, a JSON document, or annotations for GitHub Actions."""

from __future__ import annotations

from typing import Any

from memcalc.checking.report import BUDGET, CheckReport, Outcome
from memcalc.report.grid import Column, Grid
from memcalc.report.screen import Screen
from memcalc.report.terminal import draw_grid, draw_list
from memcalc.report.words import plural
from memcalc.units import Unit, format_bytes, format_number

_NOTHING = "no configuration found: nothing was checked"


def summary(report: CheckReport) -> str:
    """One line: how many configurations, how they ended, what was skipped."""
    counts = [f"{report.count(status)} {words}" for status, words in _ENDINGS.items() if report.count(status)]
    head = f"{plural(len(report.outcomes), 'config')} checked: {', '.join(counts)}" if counts else _NOTHING
    return f"{head}; {plural(report.skipped, 'other file')} skipped" if report.skipped else head


_ENDINGS: dict[Any, str] = {"fits": "fit", "does not fit": "too large", "broken": "broken"}


def check_grid(report: CheckReport, unit: Unit) -> Grid:
    """One line for each configuration that could be read."""
    rows = [
        (
            "fits" if outcome.status == "fits" else "too large",
            outcome.path,
            format_number(outcome.needed_bytes, unit),
            format_number(outcome.limit_bytes, unit),
            format_number(outcome.limit_bytes - outcome.needed_bytes, unit),
        )
        for outcome in report.outcomes
        if outcome.result is not None and outcome.needed_bytes is not None and outcome.limit_bytes is not None
    ]
    columns = (Column(""), Column("config", wrap=True), Column(f"needs {unit}", right=True))
    limits = (Column("limit", right=True), Column("to spare", right=True))
    strong = frozenset(index for index, row in enumerate(rows) if row[0] != "fits")
    return Grid("", (*columns, *limits), rows, strong)


def draw_checks(screen: Screen, report: CheckReport, unit: Unit) -> None:
    """The table of what was sized, then what is broken, then the summary."""
    grid = check_grid(report, unit)
    if grid.rows:
        draw_grid(screen, grid)
    broken = [f"{_place(outcome)}: {outcome.message}" for outcome in report.outcomes if outcome.status == "broken"]
    draw_list(screen, "Broken", broken)
    screen.line((summary(report), "bold red" if report.exit_code else "bold green"))


def _place(outcome: Outcome) -> str:
    return outcome.path if outcome.line is None else f"{outcome.path}:{outcome.line}"


def sentence(outcome: Outcome, unit: Unit) -> str:
    """What is to be said of one configuration."""
    if outcome.result is None or outcome.needed_bytes is None or outcome.limit_bytes is None:
        return outcome.message
    needed = f"needs {format_bytes(outcome.needed_bytes, unit)} ({outcome.basis}) per GPU"
    size = format_bytes(outcome.limit_bytes, unit)
    limit = f"{BUDGET} of {size}" if outcome.limit == BUDGET else f"{size} {outcome.limit}"
    spare = outcome.limit_bytes - outcome.needed_bytes
    rest = f"{format_bytes(abs(spare), unit)} {'to spare' if spare >= 0 else 'too much'}"
    return f"{needed} against {limit}: {rest}; peak in {outcome.result.ledger.peak_phase}"


def github_lines(report: CheckReport, unit: Unit) -> list[str]:
    """An annotation for each configuration that fails, a plain line for each that fits, and the summary."""
    lines = []
    for outcome in report.outcomes:
        if outcome.status == "fits":
            lines.append(f"{outcome.path}: fits, {sentence(outcome, unit)}".replace("\n", " "))
            continue
        title = "memcalc: does not fit" if outcome.status == "does not fit" else "memcalc: broken config"
        line = "" if outcome.line is None else f"line={outcome.line},"
        properties = f"file={_property(outcome.path)},{line}title={_property(title)}"
        lines.append(f"::error {properties}::{_data(sentence(outcome, unit))}")
    return [*lines, summary(report) if report.outcomes else f"::error::{_data(summary(report))}"]


def _data(text: str) -> str:
    """Escaped as GitHub's workflow commands ask for in a message."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """Escaped as they ask for in a property, which ends at a colon or a comma."""
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def check_document(report: CheckReport) -> dict[str, Any]:
    """The report as JSON."""
    return {
        "schema_version": 1,
        "exit_code": report.exit_code,
        "budget_bytes": report.budget_bytes,
        "skipped": report.skipped,
        "configs": [
            {
                "path": outcome.path,
                "status": outcome.status,
                "name": None if outcome.result is None else outcome.result.spec.name,
                "needed_bytes": outcome.needed_bytes,
                "basis": outcome.basis or None,
                "limit_bytes": outcome.limit_bytes,
                "limit": outcome.limit or None,
                "peak_phase": None if outcome.result is None else outcome.result.ledger.peak_phase,
                "message": outcome.message or None,
                "line": outcome.line,
            }
            for outcome in report.outcomes
        ],
    }
