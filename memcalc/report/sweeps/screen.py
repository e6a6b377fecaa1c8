"""A sweep in the terminal: the maps, the frontier in words, and every configuration where there are few."""

from __future__ import annotations

from memcalc.engine.grid import written
from memcalc.engine.table import TOO_LARGE, Table
from memcalc.report.grid import Column, Grid
from memcalc.report.screen import Screen
from memcalc.report.sweeps.landscape import Landscape, Map
from memcalc.report.terminal import draw_grid, draw_line, draw_list
from memcalc.report.words import plural, shortened
from memcalc.units import Unit, format_number

FEW = 32  # configurations that are listed one by one
LISTED_VALUES = 6  # of the field across, where each is named
MOST_MAPS = 12
MOST_REASONS = 8


def draw_sweep(
    screen: Screen,
    table: Table,
    name: str,
    card: str,
    unit: Unit,
    *,
    listed: bool = False,
    notes: tuple[str, ...] = (),
) -> None:
    """The whole report.

    Args:
        screen: where to.
        table: a whole grid.
        name: of the run.
        card: by which it is judged; "" without one.
        unit: of all numbers.
        listed: list every configuration, however many there are.
        notes: on the file that the grid is of.
    """
    landscape = Landscape(table)
    screen.line((_headline(table, landscape, name, card), "bold"))
    screen.line()
    maps = list(landscape.maps())
    if len(table) > 1:
        _legend(screen, landscape)
        for each in maps[:MOST_MAPS]:
            _draw_map(screen, landscape, each)
        if len(maps) > MOST_MAPS:
            draw_line(screen, f"{len(maps) - MOST_MAPS} more maps: see --plot, --output, or vary less at a time.", 0)
            screen.line()
    if listed or len(table) <= FEW:
        draw_grid(screen, table_grid(table, unit, judged=landscape.judged))
    reasons = table.reasons().most_common()
    for reason, count in reasons[:MOST_REASONS]:
        draw_line(
            screen,
            f"{plural(count, 'configuration')} {'not sized' if reason == TOO_LARGE else 'left out'}: {reason}",
            0,
        )
    if len(reasons) > MOST_REASONS:
        draw_line(screen, f"and {len(reasons) - MOST_REASONS} more reasons: see --format csv.", 0)
    draw_list(screen, "Notes", map(shortened, notes))


def _headline(table: Table, landscape: Landscape, name: str, card: str) -> str:
    words = f"{name}: {plural(len(table), 'configuration')}"
    possible = int(table.possible.sum())
    out = len(table) - possible
    if landscape.judged:
        fit = int(table.fits.sum())
        words += f" on {card or 'their cards'}: {fit:,} fit, {possible - fit:,} do not"
    return words + (f", {out:,} cannot be" if out else "")


def _legend(screen: Screen, landscape: Landscape) -> None:
    if landscape.judged:
        draw_line(screen, "0 to 9: tenths of usable memory; | the frontier; . too large; - cannot be", 0)
    else:
        draw_line(screen, "0 to 9: tenths of the largest; - cannot be. No --gpu named.", 0)
    screen.line()


def _draw_map(screen: Screen, landscape: Landscape, each: Map) -> None:
    if each.others:
        screen.line((each.others, "bold"))
    labels = max(len(landscape.down_name), *(len(row) for row in each.rows))
    last = max(len(column) for column in each.columns)
    room = max(screen.width - labels - last - 10, 10)
    step = -(-len(each.columns) // room)  # every so many columns are drawn
    shown = list(range(0, len(each.columns), step))
    skipped = f", one in {step} shown" if step > 1 else ""
    few = len(each.columns) <= LISTED_VALUES
    values = ", ".join(each.columns) if few else f"{each.columns[0]} to {each.columns[-1]}{skipped}"
    ends = f"{landscape.across_name}: {values}"
    heading = f"  {landscape.down_name:>{labels}}  {ends}"
    fits = "  fits to" if landscape.judged else ""
    screen.line((f"{heading:<{labels + 5 + len(shown)}}{fits}", "dim"))
    for number, (row, frontier) in enumerate(zip(each.rows, each.frontier(), strict=True)):
        signs = ""
        for column in shown:
            signs += _sign(each, number, column)
            if landscape.judged and frontier is not None and column <= frontier < column + step:
                signs += "|"
        answer = ("none" if frontier is None else each.columns[frontier]) if landscape.judged else ""
        width = max(len(shown) + 1, len(ends))
        screen.line((f"  {row:>{labels}}  {signs:<{width}}  {answer}", ""))
    screen.line()


def _sign(each: Map, row: int, column: int) -> str:
    if not each.valid[row, column]:
        return "-"
    if not each.fits[row, column]:
        return "."
    return str(min(int(each.share[row, column] * 10), 9))


def table_grid(table: Table, unit: Unit, *, judged: bool) -> Grid:
    """Every configuration as a row."""
    axes = [Column(field.rpartition(".")[2], right=True) for field in table.grid.fields]
    verdict = (Column("to spare", right=True), Column("")) if judged else ()
    columns = (*axes, Column(f"needs {unit}", right=True), Column("peak in"), *verdict)
    rows: list[tuple[str, ...]] = []
    strong: set[int] = set()
    for index in range(len(table)):
        values = tuple(written(value) for value in table.point(index).values())
        if not table.valid[index]:
            large = bool(table.too_large[index])
            verdict_of = ("", "too large" if large else "") if judged else ()
            rows.append((*values, "-", "more than 1 PiB" if large else "cannot be", *verdict_of))
            strong |= {index} if large and judged else set()
            continue
        needs = format_number(int(table.device_bytes[index]), unit)
        cells: tuple[str, ...] = (needs, table.phases[int(table.peak_phase[index])])
        if judged:
            fits = bool(table.fits[index])
            cells = (*cells, format_number(int(table.headroom_bytes[index]), unit), "fits" if fits else "too large")
            strong |= set() if fits else {index}
        rows.append((*values, *cells))
    return Grid("Configurations", columns, rows, frozenset(strong))
