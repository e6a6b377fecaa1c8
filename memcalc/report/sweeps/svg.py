"""Maps of a sweep as SVG or inside an HTML page, without matplotlib."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memcalc.estimation.estimate import estimate
from memcalc.report.labels import label
from memcalc.report.plots.markup import markup
from memcalc.report.sweeps.heatmaps import HeatMap, HeatMaps, answer_text
from memcalc.sweeping.table import Table
from memcalc.sweeping.verdict_terms import CLOSE, FITS
from memcalc.units import Unit, format_bytes, format_number

LEFT, TOP, GAP = 150, 62, 64  # pixels
FIELD = 640  # that the cells of a row share
_LEAST, _MOST = 14, 80  # width of a cell
_LOW, _HIGH = 14, 26  # its height, where it is too narrow for its number, and where it has one
_NUMBERED = 48  # width of a cell that has room for its number
_LABELS = 12  # along the columns, at most
_LIGHT, _DARK, _CLOSE, _NOT, _NONE = (237, 248, 251), (0, 109, 44), "#ffe680", "#fdd9c7", "#e0e0e0"
_BOUNDARY = "#CC0000"
_DARK_FROM = 0.6  # of the GPU: from there on the green is dark, and numbers on it are white


class CellSize(NamedTuple):
    """The size of a cell, in pixels: few columns are wide, and then have their numbers written in them."""

    width: int
    height: int

    @property
    def numbered(self) -> bool:
        """Whether its number fits in it."""
        return self.width >= _NUMBERED


def cell_of(columns: int) -> CellSize:
    """Return the size of a cell in a map with this number of columns."""
    width = max(_LEAST, min(_MOST, FIELD // max(columns, 1)))
    return CellSize(width, _HIGH if width >= _NUMBERED else _LOW)


def cause(table: Table, unit: Unit) -> str:
    """Return why nothing fits: need and largest component of the closest configuration; "" if one may fit."""
    judged = table.valid & (table.usable_bytes >= 0)
    if not judged.any() or table.fits.any() or table.close.any():
        return ""
    at = int(np.where(judged, table.device_bytes - table.usable_bytes, np.iinfo(np.int64).max).argmin())
    values = ", ".join(f"{field.rpartition('.')[2]} = {value}" for field, value in table.point(at).items())
    needs, usable = (format_bytes(int(size[at]), unit) for size in (table.device_bytes, table.usable_bytes))
    ledger = estimate(table.spec(at)).ledger
    largest, size = max(ledger.components(ledger.peak_phase).items(), key=lambda part: part[1])
    most = f"{format_bytes(size, unit)} of it {label(largest)}"
    return f"Nothing fits: the closest ({values}) needs {needs}, {most}, of {usable}."


def heat_maps(table: Table, title: str, unit: Unit) -> str:
    """Return an <svg> element with the maps below one another."""
    landscape = HeatMaps(table)
    body: list[str] = [f'<text x="10" y="22" font-size="15" font-weight="bold">{markup(title)}</text>']
    if landscape.has_verdicts and (why := cause(table, unit)):
        body.append(f'<text x="10" y="42" font-size="13" fill="{_BOUNDARY}">{markup(why)}</text>')
    y, width = TOP, 0
    maps = list(islice(landscape.maps(), MOST_MAPS))
    down, across = factors(len(maps[0].rows), len(maps[0].columns), MOST_CELLS // len(maps))
    for whole in maps:
        each = whole if down == across == 1 else merged(whole, down, across)
        body += _map(landscape, each, y, table, unit, "" if each is whole else "at most ")
        cell = cell_of(len(each.columns))
        y += GAP + cell.height * len(each.rows)
        width = max(width, LEFT + cell.width * len(each.columns) + 40, LEFT + FIELD + 40)
    words = "green: fits, by share of the GPU; yellow: close; pale red: does not fit; gray: invalid; red line: boundary"
    if not landscape.has_verdicts:
        words = "green: share of the largest; gray: invalid"
    if cell_of(len(maps[0].columns)).numbered:
        words += f"; numbers: device memory, {unit}"
    for line in (words, *_left_out(table, len(maps), maps[0], down, across)):
        body.append(f'<text x="10" y="{y}">{line}</text>')
        y += 14
    y -= 14
    size = f'viewBox="0 0 {width} {y + 14}" width="{width}" height="{y + 14}"'
    style = 'font-family="sans-serif" font-size="11"'
    lines = "\n".join(body)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style} role="img">\n{lines}\n</svg>\n'


def heat_map_page(table: Table, title: str, unit: Unit) -> str:
    """Return the maps as an HTML page; a cell shows its numbers under the pointer."""
    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{markup(title)}</title></head>'
    return f"{head}<body>\n{heat_maps(table, title, unit)}</body></html>\n"


def _left_out(table: Table, drawn: int, first: HeatMap, down: int, across: int) -> Iterator[str]:
    """Yield the parts that a plot of this size omits."""
    if down * across > 1:
        yield (
            f"each cell shows the largest of up to {down * across:,} configurations: it fits if all of them fit, and "
            "is close if none is too large"
        )
    others = len(table) // first.numbers.size - drawn
    if others > 0:
        yield f"{others:,} more maps are not drawn: vary less at a time"


def _map(landscape: HeatMaps, each: HeatMap, top: int, table: Table, unit: Unit, bound: str) -> list[str]:
    lines = (
        [f'<text x="{LEFT}" y="{top + 10}" font-weight="bold">{markup(each.other_axes)}</text>']
        if each.other_axes
        else []
    )
    cell = cell_of(len(each.columns))
    top += 18
    for row, name in enumerate(each.rows):
        y = top + cell.height * row
        middle = y + cell.height // 2 + 4
        lines.append(f'<text x="{LEFT - 6}" y="{middle}" text-anchor="end">{markup(name)}</text>')
        for column, across in enumerate(each.columns):
            x = LEFT + cell.width * column
            place = f'x="{x}" y="{y}" width="{cell.width}" height="{cell.height}"'
            where = f"{landscape.across_name} = {across}" + (f", {landscape.down_name} = {name}" if name else "")
            number = int(each.numbers[row, column])
            needs = "more than 1 PiB" if table.too_large[number] else "invalid"
            if table.valid[number]:
                needs = bound + format_bytes(int(table.device_bytes[number]), unit)
                needs += f", {answer_text(table, number)}" if landscape.has_verdicts else ""
            words = markup(f"{where}: {needs}")
            lines.append(f'<rect {place} fill="{_fill(each, row, column)}"><title>{words}</title></rect>')
            if cell.numbered and table.valid[number]:
                dark = each.verdict[row, column] == FITS and each.fraction[row, column] > _DARK_FROM
                ink = "#ffffff" if dark else "#222222"
                size = format_number(int(table.device_bytes[number]), unit)
                place = f'x="{x + cell.width // 2}" y="{middle}" fill="{ink}"'
                lines.append(f'<text {place} text-anchor="middle" pointer-events="none">{size}</text>')
    lines.append(_boundary(landscape, each, top))
    bottom = top + cell.height * len(each.rows) + 12
    every = -(-len(each.columns) // _LABELS)
    for column in range(0, len(each.columns), every):
        x = LEFT + cell.width * column + cell.width // 2
        lines.append(f'<text x="{x}" y="{bottom}" text-anchor="middle">{markup(each.columns[column])}</text>')
    lines.append(f'<text x="{LEFT}" y="{bottom + 13}">{markup(landscape.across_name)}</text>')
    down = markup(landscape.down_name)
    lines.append(f'<text x="10" y="{top + cell.height // 2 + 4}">{down}</text>')
    return lines


def _boundary(landscape: HeatMaps, each: HeatMap, top: int) -> str:
    """Return a line to the right of the cells that fit, row by row."""
    if not landscape.has_verdicts:
        return ""
    cell = cell_of(len(each.columns))
    path, before = "", None
    for row, (last, _) in enumerate(each.boundaries()):
        x = LEFT + cell.width * (0 if last is None else last + 1)
        path += (
            f"{'M' if before is None else 'H'}{x}"
            + (f" {top}" if before is None else "")
            + f"V{top + cell.height * (row + 1)}"
        )
        before = x
    return f'<path d="{path}" fill="none" stroke="{_BOUNDARY}" stroke-width="2"/>'


def _fill(each: HeatMap, row: int, column: int) -> str:
    if not each.valid[row, column]:
        return _NONE
    if each.verdict[row, column] != FITS:
        return _CLOSE if each.verdict[row, column] == CLOSE else _NOT
    share = min(float(each.fraction[row, column]), 1.0)
    parts = (round(light + (dark - light) * share) for light, dark in zip(_LIGHT, _DARK, strict=True))
    return "#" + "".join(f"{part:02x}" for part in parts)


MOST_CELLS = 20_000  # of a picture: three megabytes
MOST_MAPS = 50
WIDEST = 1_000  # cells in a row


def factors(rows: int, columns: int, most: int) -> tuple[int, int]:
    """How many rows and columns become one, so that no more than `most` cells are left."""
    down = across = 1
    while (left := -(-columns // across)) > WIDEST or left * -(-rows // down) > max(most, 1):
        if left > WIDEST or left >= -(-rows // down):
            across += 1
        else:
            down += 1
    return down, across


def merged(each: HeatMap, down: int, across: int) -> HeatMap:
    """Return the map with groups of rows and columns merged: each cell is the configuration that needs most.

    A merged cell fits if all its valid configurations fit, and does not fit if one does not.
    """
    # Invalid configurations come last, then those outside the map; those that do not fit before close ones.
    needs = np.where(each.valid, each.fraction + 1e9 * each.verdict, -1.0)
    heights, widths = (-(-size // factor) for size, factor in zip(needs.shape, (down, across), strict=True))
    padded = np.full((heights * down, widths * across), -2.0)
    padded[: needs.shape[0], : needs.shape[1]] = needs
    blocks = padded.reshape(heights, down, widths, across).transpose(0, 2, 1, 3).reshape(heights, widths, -1)
    inner = blocks.argmax(axis=2)
    row = np.arange(heights)[:, None] * down + inner // across
    column = np.arange(widths)[None, :] * across + inner % across
    place: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] = (row, column)
    return HeatMap(
        each.other_axes,
        _labels(each.rows, down),
        _labels(each.columns, across),
        each.numbers[place],
        each.fraction[place],
        each.verdict[place],
        each.valid[place],
    )


def _labels(names: list[str], factor: int) -> list[str]:
    """Return the first and the last value of each group."""
    groups = (names[start : start + factor] for start in range(0, len(names), factor))
    return [group[0] if len(group) == 1 else f"{group[0]} to {group[-1]}" for group in groups]
