"""Report of a sweep by runs: every cell, why some have no figures, and the same for other programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import fields

from memcalc.cells.cell import CellResult, GridCell, GridCells
from memcalc.report.csv_text import csv_text
from memcalc.report.labels import plural
from memcalc.report.screen import Column, Screen, TextTable, draw_grid, draw_line, numeric
from memcalc.sweeping.grid import written
from memcalc.units import Unit, format_number

FEW = 32  # cells that are listed separately
FULLEST = 12  # that are listed, where there are more
MOST_REASONS = 8
HOW = {"trace": "traced on fake tensors", "null": "traced on the null device", "dry-run": "run on the null device"}
WORDS = {"fits": "fit", "does-not-fit": "do not fit", "unknown": "close"}
SHOWN = {"fits": "fits", "does-not-fit": "does not fit", "unknown": "cannot say", None: ""}


def draw_cells(screen: Screen, cells: GridCells, file: str, unit: Unit, *, listed: bool = False) -> None:
    """Draw the screen of `memcalc sweep --by`.

    Args:
        screen: where to.
        cells: of the sweep, each with its answer.
        file: in which they are kept.
        unit: of all numbers.
        listed: list every cell, however many there are.
    """
    screen.line((_headline(cells), "bold"))
    screen.line()
    if listed or len(cells.cells) <= FEW:
        draw_grid(screen, cells_grid("Cells", cells, cells.cells, unit))
    else:
        fits = [cell for cell in cells.cells if _answer(cell).verdict in ("fits", None) and _answer(cell).device_bytes]
        fullest = sorted(fits, key=lambda cell: -(_answer(cell).device_bytes or 0))[:FULLEST]
        draw_grid(screen, cells_grid("The largest that fit", cells, fullest, unit))
        draw_line(screen, f"--all lists all {len(cells.cells):,} cells, and so does --format csv.", 0)
        screen.line()
    reasons = Counter((_answer(cell).outcome, _answer(cell).reason) for cell in cells.cells)
    counted = [(outcome, reason, count) for (outcome, reason), count in reasons.most_common() if reason]
    for outcome, reason, count in counted[:MOST_REASONS]:
        draw_line(screen, f"{plural(count, 'cell')} {outcome}: {reason}", 0)
    if len(counted) > MOST_REASONS:
        draw_line(screen, f"and {len(counted) - MOST_REASONS} more reasons: see --format csv.", 0)
    before = f", {cells.used:,} of them from an earlier run" if cells.used else ""
    kept = plural(len(cells.cells) - (cells.unkept is not None), "cell")
    draw_line(screen, f"{kept} in {file}{before}.{' No others were run.' if cells.unkept else ''}", 0)
    lost = sum(_answer(cell).outcome == "lost" for cell in cells.cells)
    if lost:
        draw_line(screen, f"The same command runs the {plural(lost, 'lost cell')} again.", 0)


def _answer(cell: GridCell) -> CellResult:
    assert cell.answer is not None
    return cell.answer


def _headline(cells: GridCells) -> str:
    counts: Counter[str] = Counter()
    for cell in cells.cells:
        answer = _answer(cell)
        counts[WORDS.get(answer.verdict or "", "measured") if answer.outcome == "measured" else answer.outcome] += 1
    order = ("fit", "close", "do not fit", "measured", "invalid", "failed", "lost")
    found = ", ".join(f"{counts[word]:,} {word}" for word in order if counts[word])
    return f"{cells.name}: {plural(len(cells.cells), 'cell')} {HOW[cells.by]}: {found}"


def cells_grid(title: str, cells: GridCells, shown: Iterable[GridCell], unit: Unit) -> TextTable:
    """Return one row for each cell."""
    axes = [Column(field, right=True) for field in cells.fields]
    columns = (*axes, *numeric(f"allocated {unit}", "reserved", "device", "headroom"), Column(""))
    rows, strong = [], set()
    for number, cell in enumerate(shown):
        answer = _answer(cell)
        sizes = (answer.allocated_bytes, answer.reserved_bytes, answer.device_bytes, answer.headroom_bytes)
        numbers = ["-" if size is None else format_number(size, unit) for size in sizes]
        words = SHOWN[answer.verdict] if answer.outcome == "measured" else answer.outcome
        if answer.verdict == "does-not-fit":
            strong.add(number)
        rows.append((*map(written, cell.values.values()), *numbers, words))
    return TextTable(title, columns, rows, frozenset(strong))


def cells_csv(cells: GridCells) -> str:
    """Return one line for each cell, without a final line break."""
    names = [each.name for each in fields(CellResult)]
    rows = ([*cell.values.values(), *(getattr(_answer(cell), name) for name in names)] for cell in cells.cells)
    written_out = (["" if value is None else written(value) for value in row] for row in rows)
    return csv_text([*cells.fields, *names], written_out)
