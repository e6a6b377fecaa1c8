"""Report of `check` on the terminal, and as Markdown for pull requests."""

from __future__ import annotations

from memcalc.checking.report import CheckOutcome, CheckReport
from memcalc.report.checks.text import notes, place, summary
from memcalc.report.screen import BAD, GOOD, Column, Screen, TextTable, draw_grid, draw_list, markdown_grid, numeric
from memcalc.text import harmless
from memcalc.units import Unit, format_number

_GONE = "In the baseline, but not checked"
_LISTED = 12  # of those; a check of a few files against a large baseline omits most
_WORDS = {"fits": "fits", "does not fit": "too large", "unknown": "cannot say", "grew": "grew"}


def check_grid(report: CheckReport, unit: Unit) -> TextTable:
    """One line for each configuration that could be read."""
    rows = [
        (
            _WORDS[outcome.status],
            outcome.path,
            f"{'≥ ' if outcome.is_bound or outcome.unmodelled else ''}{format_number(outcome.needed_bytes, unit)}",
            format_number(outcome.limit_bytes, unit),
            format_number(outcome.limit_bytes - outcome.needed_bytes, unit),
            *((_change(outcome, unit),) if report.compared else ()),
        )
        for outcome in report.outcomes
        if outcome.needed_bytes is not None and outcome.limit_bytes is not None
    ]
    columns = [Column(""), Column("config", wrap=True), Column(f"needs {unit}", right=True)]
    columns += [*numeric("limit", "free")]
    if report.compared:
        columns.append(Column("change", right=True))
    strong = frozenset(index for index, row in enumerate(rows) if row[0] != "fits")
    return TextTable("", tuple(columns), rows, strong)


def draw_checks(screen: Screen, report: CheckReport, unit: Unit) -> None:
    """Draw the table of checked configs, the invalid ones, those missing from this check, and the summary."""
    grid = check_grid(report, unit)
    if grid.rows:
        draw_grid(screen, grid)
    draw_list(screen, "Invalid", _broken(report))
    draw_list(screen, _GONE, _gone(report))
    draw_list(screen, "Notes", notes(report))
    screen.line((summary(report), BAD if report.exit_code else GOOD))


def check_markdown(report: CheckReport, unit: Unit) -> str:
    """Return the same report as Markdown."""
    lines = [f"**memcalc**: {summary(report)}", ""]
    grid = check_grid(report, unit)
    if grid.rows:
        lines += markdown_grid(grid)
    for title, items in (("Invalid", _broken(report)), (_GONE, _gone(report)), ("Notes", notes(report))):
        if items:
            lines += [f"### {title}", "", *(f"- {_plain(item)}" for item in items), ""]
    return "\n".join(lines).rstrip()


def _broken(report: CheckReport) -> list[str]:
    broken = (outcome for outcome in report.outcomes if outcome.status == "broken")
    return [" ".join(f"{place(outcome)}: {outcome.message}".split()) for outcome in broken]


def _gone(report: CheckReport) -> list[str]:
    more = len(report.missing) - _LISTED
    return [*report.missing[:_LISTED], f"and {more} more"] if more > 0 else list(report.missing)


def _change(outcome: CheckOutcome, unit: Unit) -> str:
    if outcome.growth is None:
        return "new"
    difference = outcome.growth.difference
    number = format_number(difference, unit)
    return "same" if difference == 0 else f"+{number}" if difference > 0 else number


def _plain(text: str) -> str:
    """Return the text with Markdown's special characters escaped; messages quote user input."""
    for sign in "\\`*_[]<>|":
        text = text.replace(sign, f"\\{sign}")
    return harmless(" ".join(text.split()))
