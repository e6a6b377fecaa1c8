"""Screen of a sweep: maps, the Pareto front, and every configuration if there are few."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memcalc.report.labels import plural, shortened
from memcalc.report.screen import Column, Screen, TextTable, draw_grid, draw_line, draw_list
from memcalc.report.sweeps.heatmaps import Boundary, HeatMap, HeatMaps, answer_text, verdict_notes
from memcalc.sweeping.grid import written
from memcalc.sweeping.pareto_front import GrowthAxes
from memcalc.sweeping.table import TOO_LARGE, Table
from memcalc.sweeping.verdict_terms import CLOSE, DOES_NOT_FIT, FITS
from memcalc.units import Unit, format_number

FEW = 32  # configurations that are listed separately
LISTED_VALUES = 6  # of the field across, where each is named
MOST_MAPS = 12
MOST_REASONS = 8
MOST_OF_FRONT = 12


def draw_sweep(
    screen: Screen,
    table: Table,
    name: str,
    gpu: str,
    unit: Unit,
    *,
    listed: bool = False,
    notes: tuple[str, ...] = (),
) -> None:
    """Draw the screen of `memcalc sweep`.

    Args:
        screen: where to.
        table: a whole grid.
        name: of the run.
        gpu: by which it is judged; "" without one.
        unit: of all numbers.
        listed: list every configuration, however many there are.
        notes: on the file that the grid is of.
    """
    landscape = HeatMaps(table)
    screen.line((_headline(table, landscape, name, gpu), "bold"))
    screen.line()
    maps = list(landscape.maps())
    if len(table) > 1:
        _legend(screen, landscape)
        for each in maps[:MOST_MAPS]:
            _draw_map(screen, landscape, each)
        if len(maps) > MOST_MAPS:
            draw_line(screen, f"{len(maps) - MOST_MAPS} more maps: see --plot, --output, or vary less at a time.", 0)
            screen.line()
    if landscape.has_verdicts:
        _draw_front(screen, table, unit)
    if listed or len(table) <= FEW:
        draw_grid(screen, table_grid(table, unit, judged=landscape.has_verdicts))
    if landscape.has_verdicts:
        _draw_notes(screen, table)
    reasons = table.reasons().most_common()
    for reason, count in reasons[:MOST_REASONS]:
        draw_line(
            screen,
            f"{plural(count, 'configuration')} {'not estimated' if reason == TOO_LARGE else 'excluded'}: {reason}",
            0,
        )
    if len(reasons) > MOST_REASONS:
        draw_line(screen, f"and {len(reasons) - MOST_REASONS} more reasons: see --format csv.", 0)
    draw_list(screen, "Notes", map(shortened, notes))


def _headline(table: Table, landscape: HeatMaps, name: str, gpu: str) -> str:
    words = f"{name}: {plural(len(table), 'configuration')}"
    possible = int(table.possible.sum())
    out = len(table) - possible
    if landscape.has_verdicts:
        fit, close = int(table.fits.sum()), int(table.close.sum())
        several = f", {close:,} close" if close else ""
        words += f" on {gpu or 'their GPUs'}: {fit:,} fit{several}, {possible - fit - close:,} do not fit"
    return words + (f", {out:,} invalid" if out else "")


def _legend(screen: Screen, landscape: HeatMaps) -> None:
    if landscape.has_verdicts:
        draw_line(screen, "0 to 9: tenths of usable memory; | boundary; ? close; . too large; - invalid", 0)
    else:
        draw_line(screen, "0 to 9: tenths of the largest; - invalid. No --gpu named.", 0)
    screen.line()


def _draw_map(screen: Screen, landscape: HeatMaps, each: HeatMap) -> None:
    if each.other_axes:
        screen.line((each.other_axes, "bold"))
    labels = max(len(landscape.down_name), *(len(row) for row in each.rows))
    last = max(len(column) for column in each.columns)
    room = max(screen.width - labels - last - 10, 10)
    step = -(-len(each.columns) // room)  # one of this number of columns is drawn
    shown = list(range(0, len(each.columns), step))
    skipped = f", one in {step} shown" if step > 1 else ""
    few = len(each.columns) <= LISTED_VALUES
    values = ", ".join(each.columns) if few else f"{each.columns[0]} to {each.columns[-1]}{skipped}"
    ends = f"{landscape.across_name}: {values}"
    heading = f"  {landscape.down_name:>{labels}}  {ends}"
    fits = "  fits to" if landscape.has_verdicts else ""
    screen.line((f"{heading:<{labels + 5 + len(shown)}}{fits}", "dim"))
    for number, (row, boundary) in enumerate(zip(each.rows, each.boundaries(), strict=True)):
        signs = ""
        for column in shown:
            signs += _sign(each, number, column)
            if landscape.has_verdicts and boundary.fits is not None and column <= boundary.fits < column + step:
                signs += "|"
        answer = _boundary_text(each, boundary) if landscape.has_verdicts else ""
        width = max(len(shown) + 1, len(ends))
        screen.line((f"  {row:>{labels}}  {signs:<{width}}  {answer}", ""))
    screen.line()


def _boundary_text(each: HeatMap, boundary: Boundary) -> str:
    fits = "none" if boundary.fits is None else each.columns[boundary.fits]
    return fits if boundary.close is None else f"{fits} (up to {each.columns[boundary.close]} close)"


def _sign(each: HeatMap, row: int, column: int) -> str:
    if not each.valid[row, column]:
        return "-"
    if each.verdict[row, column] != FITS:
        return "?" if each.verdict[row, column] == CLOSE else "."
    return str(min(int(each.fraction[row, column] * 10), 9))


def _draw_front(screen: Screen, table: Table, unit: Unit) -> None:
    """Draw the configurations of the Pareto front, if several are compared."""
    numbers = np.flatnonzero(GrowthAxes(table).members()).tolist() if len(table) > 1 else []
    if not numbers:
        return
    title = "Pareto front: the largest that fit or are close"
    draw_grid(screen, table_grid(table, unit, judged=True, numbers=numbers[:MOST_OF_FRONT], title=title))
    if len(numbers) > MOST_OF_FRONT:
        draw_line(screen, f"and {len(numbers) - MOST_OF_FRONT} more on the front: see --format csv.", 0)
        screen.line()


def _draw_notes(screen: Screen, table: Table) -> None:
    for note in verdict_notes(table):
        draw_line(screen, note, 0)


def table_grid(
    table: Table, unit: Unit, *, judged: bool, numbers: Sequence[int] | None = None, title: str = "Configurations"
) -> TextTable:
    """Return configurations as rows.

    Args:
        table: a whole grid.
        unit: of all numbers.
        judged: whether cards are named.
        numbers: of the configurations; None: all of them.
        title: of the rows.
    """
    axes = [Column(field.rpartition(".")[2], right=True) for field in table.grid.fields]
    verdict = (Column("headroom", right=True), Column("")) if judged else ()
    columns = (*axes, Column(f"needs {unit}", right=True), Column("peak in"), *verdict)
    rows: list[tuple[str, ...]] = []
    strong: set[int] = set()
    for index in range(len(table)) if numbers is None else numbers:
        values = tuple(written(value) for value in table.point(index).values())
        if judged and table.verdict[index] == DOES_NOT_FIT:
            strong.add(len(rows))
        if not table.valid[index]:
            large = bool(table.too_large[index])
            verdict_of = ("", "does not fit" if large else "") if judged else ()
            rows.append((*values, "-", "more than 1 PiB" if large else "invalid", *verdict_of))
            continue
        needs = format_number(int(table.device_bytes[index]), unit)
        cells: tuple[str, ...] = (needs, table.phases[int(table.peak_phase[index])])
        if judged:
            headroom = format_number(int(table.headroom_bytes[index]), unit)
            replayed = ", replayed" if table.replayed[index] else ""
            cells = (*cells, headroom, f"{answer_text(table, index)}{replayed}")
        rows.append((*values, *cells))
    return TextTable(title, columns, rows, frozenset(strong))
