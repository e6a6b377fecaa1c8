"""Screen of `fit`: verdict, layouts with costs and memory, largest values, changes, and the written file."""

from __future__ import annotations

import shlex
from itertools import groupby
from pathlib import Path

from memcalc.report.screen import BAD, GOOD, Screen, draw_grid, draw_line, draw_list
from memcalc.report.screens.fit_tables import (
    cost_grid,
    gpu_grid,
    layout_grid,
    memory_grid,
    offer_grid,
    pruned_grid,
    term_grid,
)
from memcalc.report.screens.fit_text import (
    KINDS_OF_CHANGES,
    change_lines,
    changes_title,
    layouts_sentence,
    layouts_verdict,
    maximum_lines,
    minimum_sentence,
    notes,
    reason_lines,
    searched_run,
    subject_lines,
    unchanged_sentence,
)
from memcalc.report.screens.sizing import VERDICT_STYLES
from memcalc.search.exported_layout import ExportedLayout
from memcalc.search.result import FitResult
from memcalc.units import Unit, format_bytes

_STYLES = {True: GOOD, False: BAD}  # of what was found, or not

EQUAL = 0.001  # of the memory of a layout: a written file that needs more or less says so


def draw_fit(screen: Screen, answer: FitResult, unit: Unit, *, why: bool = False) -> None:
    """Draw the screen of `memcalc fit`; `why` adds the excluded layouts."""
    query = answer.query
    for line in subject_lines(answer):
        draw_line(screen, line, 0)
    screen.line()
    if query.minimize is not None:
        draw_line(screen, minimum_sentence(answer, unit), 0, style=VERDICT_STYLES[answer.verdict])
        if answer.offers:
            screen.line()
            draw_grid(screen, offer_grid(answer))
    elif query.maximize is None or answer.base is None:
        asked = "does-not-fit" if answer.unchanged is None else answer.unchanged.verdict
        draw_line(screen, unchanged_sentence(answer, unit), 0, style=VERDICT_STYLES[asked])
    offered = bool(answer.offers) and answer.ranking is None  # a table is last already
    layouts = answer.ranking is not None and (query.maximize is None or answer.base is None)
    if layouts:
        draw_line(screen, layouts_sentence(answer), 0, style=VERDICT_STYLES[layouts_verdict(answer)])
    if (query.maximize is None or answer.base is None) and not offered:
        screen.line()
    if layouts and answer.best:
        for grid in (layout_grid(answer, unit), cost_grid(answer), memory_grid(answer, unit)):
            draw_grid(screen, grid)
    if answer.gpu_verdicts:
        draw_grid(screen, gpu_grid(answer, unit))
    _draw_maxima(screen, answer, unit)
    _draw_nearest(screen, answer, unit)
    if layouts and answer.best:
        draw_grid(screen, term_grid(answer))
    if why:
        draw_grid(screen, pruned_grid(answer))
    draw_list(screen, "Notes", notes(answer, why=why))


def _draw_maxima(screen: Screen, answer: FitResult, unit: Unit) -> None:
    if answer.maxima:
        draw_line(screen, f"The largest that fit, {searched_run(answer)}", 0, style="bold")
        for found in answer.maxima.values():
            first, *rest = maximum_lines(found, unit)
            draw_line(screen, first, 2, style=_STYLES[found.value > 0])
            for line in rest:
                draw_line(screen, line, 5)
        screen.line()


def _draw_nearest(screen: Screen, answer: FitResult, unit: Unit) -> None:
    if answer.changed is not None:
        draw_line(
            screen,
            changes_title(answer),
            0,
            style="bold" if answer.smallest_changes else VERDICT_STYLES["does-not-fit"],
        )
        for kind, several in groupby(answer.smallest_changes, lambda found: KINDS_OF_CHANGES[found.change.result]):
            draw_line(screen, kind, 2)
            for found in several:
                settings, effect = change_lines(found, unit)
                draw_line(screen, settings, 4, style="bold")
                draw_line(screen, effect, 7)
    for line in reason_lines(answer, unit):
        draw_line(screen, line, 2)
    if answer.changed is not None or answer.reason is not None:
        screen.line()


_WIDTH = 78  # of a command's lines, which end in a backslash


def written_text(written: ExportedLayout, file: Path, unit: Unit) -> str:
    """Return where the file is, the command that reads it with the settings that complete it, and what changes."""
    words = iter(written.file.command(file))
    lines = [""]
    for word in words:
        part = shlex.quote(word)
        if word in ("--set", "--gpu"):
            part += f" {shlex.quote(next(words))}"
        if lines[-1] and len(lines[-1]) + len(part) > _WIDTH:
            lines.append(f"  {part}")
        else:
            lines[-1] += f"{' ' if lines[-1] else ''}{part}"
    label, command = written.file.program.label, " \\\n".join(f"  {line}" for line in lines)
    text = f"Wrote {file} for {label}. Add these settings, which it cannot contain:\n{command}"
    result = written.result
    if abs(written.more_bytes) > EQUAL * (written.layout.headline.device_bytes or 0) or not result.fits:
        needed, above = (format_bytes(each.headline.device_bytes or 0, unit) for each in (result, written.layout))
        sure = "" if result.fits else ", and may not fit"
        text += f"\nAs {label} runs it, this layout needs {needed}, not {above} as above{sure}."
    return text
