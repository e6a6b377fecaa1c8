"""The part of `oom`'s report that a configuration adds: the ledger at the failing moment, and what would fit."""

from __future__ import annotations

from collections.abc import Iterable

from memcalc.diagnosis.changes import ExplainedReport
from memcalc.report.labels import label, letter, meaning, percent, shortened
from memcalc.report.screen import Column, Screen, TextTable, draw_grid, draw_line, draw_list, numeric
from memcalc.report.screens.verdict import subject
from memcalc.suggestions.change_search import SuggestedChange
from memcalc.units import Unit, format_bytes, format_number

SHOWN = 8  # changes that save memory but do not fit


def draw_explained(screen: Screen, explained: ExplainedReport, unit: Unit) -> None:
    """Draw the configuration, its components at the point of failure, and the changes."""
    for line in subject(explained.result).lines:
        draw_line(screen, line, 0)
    screen.line()
    draw_grid(screen, ledger_grid(explained, unit))
    draw_line(screen, budget_sentence(explained, unit), 2)
    screen.line()
    _draw_changes(screen, explained, unit)
    draw_list(screen, "Notes on this estimate", map(shortened, explained.notes))


def budget_sentence(explained: ExplainedReport, unit: Unit) -> str:
    """Return the memory that the step needs, and the memory that was available."""
    low, high = (format_bytes(size, unit) for size in (explained.needed.low_bytes, explained.needed.high_bytes))
    errors = explained.needed.errors
    how = "by allocator replay" if errors.replayed else "not replayed"
    span = f" ({how}: {low} to {high})" if low != high else f" ({how})"
    needed = f"The step needs {format_bytes(explained.needed.bytes, unit)} reserved at its peak{span}"
    if explained.budget is None:
        return f"{needed}; the available memory is unknown (add --gpu GPU)."
    return f"{needed}; there were {format_bytes(explained.budget, unit)}, {explained.budget_source}."


def ledger_grid(explained: ExplainedReport, unit: Unit) -> TextTable:
    """Return the components at the point of failure, their sum, and the run's memory."""
    rows = [
        (
            letter(part.value),
            label(part.value),
            format_number(size, unit),
            percent(size, explained.allocated),
            meaning(part.value),
        )
        for part, size in explained.components.items()
    ]
    strong = frozenset((len(rows),))
    rows.append(("", "ledger", format_number(explained.allocated, unit), "", "estimated"))
    if explained.run_bytes is not None:
        rows.append(("", "the run", format_number(explained.run_bytes, unit), "", "allocated plus requested"))
    if explained.unexplained:
        rows.append(("", "not explained", format_number(explained.unexplained, unit), "", "beyond the estimate"))
    columns = (Column(""), Column("component"), *numeric(unit, "share"))
    title = f"Estimate at the point of failure: {explained.phase}"
    return TextTable(title, (*columns, Column("description", wrap=True)), rows, strong, letters=True)


def _draw_changes(screen: Screen, explained: ExplainedReport, unit: Unit) -> None:
    """Draw the changes that fit, those that may fit, and those that save most without fitting."""
    fitting = [change for change in explained.changes if change.fits]
    known = explained.budget is not None
    uncertain = [change for change in explained.changes if known and change.fits is None]
    others = [change for change in explained.changes if change.fits is False or not known][:SHOWN]
    rest = "" if not known else ", but not enough" if fitting or uncertain else "; none of them fits"
    groups = (
        ("Changes that fit, by what they require", fitting),
        ("Changes that may fit: the limit is inside their intervals", uncertain),
        (f"Changes that save memory{rest}", others),
    )
    for title, changes in groups:
        if changes:
            screen.line((title, "bold"))
        for change in changes:
            draw_line(screen, settings(change), 2, style="bold" if change.fits else "")
            draw_line(screen, effect(change, unit), 5)
        if changes:
            screen.line()


def settings(change: SuggestedChange) -> str:
    """Return the change in the syntax of --set, without the names of the blocks."""
    return as_typed(change.overrides)


def as_typed(overrides: Iterable[str]) -> str:
    """Words of --set without the names of the blocks; another GPU in place of --gpu, which wins."""
    words = (override.partition(".")[2] for override in overrides)
    return " ".join(f"--gpu {word[4:]}" if word.startswith("gpu=") else word for word in words)


def effect(change: SuggestedChange, unit: Unit) -> str:
    """Return the saved memory, the memory that is then needed, and the cost of a change."""
    saved, needed = format_bytes(change.saved, unit), format_bytes(change.needed, unit)
    least = "at least " if change.fits is False else ""  # a bound may have been enough to say so
    saves = f"saves {saved}, then " if change.saved > 0 else "reduces fragmentation, "
    return f"{saves}needs {least}{needed}; cost: {change.cost}; {change.result}"
