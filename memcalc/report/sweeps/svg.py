"""Maps of a sweep as SVG or inside an HTML page, without matplotlib."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from memcalc.engine.table import Table
from memcalc.engine.terms import CLOSE, FITS
from memcalc.report.plots.markup import markup
from memcalc.report.sweeps.downsampling import MOST_CELLS, MOST_MAPS, factors, merged
from memcalc.report.sweeps.heatmaps import Landscape, Map
from memcalc.report.sweeps.text import answer_text
from memcalc.units import Unit, format_bytes

CELL, LEFT, TOP, GAP = 14, 150, 46, 64  # pixels
_LABELS = 12  # along the columns, at most
_LIGHT, _DARK, _CLOSE, _NOT, _NONE = (237, 248, 251), (0, 109, 44), "#ffe680", "#fdd9c7", "#e0e0e0"
_BOUNDARY = "#CC0000"


def heat_maps(table: Table, title: str, unit: Unit) -> str:
    """An <svg> element with every map below one another."""
    landscape = Landscape(table)
    body: list[str] = [f'<text x="10" y="22" font-size="15" font-weight="bold">{markup(title)}</text>']
    y, width = TOP, 0
    maps = list(islice(landscape.maps(), MOST_MAPS))
    down, across = factors(len(maps[0].rows), len(maps[0].columns), MOST_CELLS // len(maps))
    for whole in maps:
        each = whole if down == across == 1 else merged(whole, down, across)
        body += _map(landscape, each, y, table, unit, "" if each is whole else "at most ")
        y += GAP + CELL * len(each.rows)
        width = max(width, LEFT + CELL * len(each.columns) + 40, 640)
    words = "green: fits, by share of the GPU; yellow: close; pale red: does not fit; gray: invalid; red line: boundary"
    if not landscape.judged:
        words = "green: share of the largest; gray: invalid"
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


def _left_out(table: Table, drawn: int, first: Map, down: int, across: int) -> Iterator[str]:
    """Return what a plot of this size omits."""
    if down * across > 1:
        yield (
            f"each cell is up to {down * across:,} configurations, as large as the largest of them: it fits if all of "
            "them fit, and is close if none is too large"
        )
    others = len(table) // first.numbers.size - drawn
    if others > 0:
        yield f"{others:,} more maps are not drawn: vary less at a time"


def _map(landscape: Landscape, each: Map, top: int, table: Table, unit: Unit, bound: str) -> list[str]:
    lines = [f'<text x="{LEFT}" y="{top + 10}" font-weight="bold">{markup(each.others)}</text>'] if each.others else []
    top += 18
    for row, name in enumerate(each.rows):
        y = top + CELL * row
        lines.append(f'<text x="{LEFT - 6}" y="{y + CELL - 3}" text-anchor="end">{markup(name)}</text>')
        for column, across in enumerate(each.columns):
            place = f'x="{LEFT + CELL * column}" y="{y}" width="{CELL}" height="{CELL}"'
            where = f"{landscape.across_name} = {across}" + (f", {landscape.down_name} = {name}" if name else "")
            number = int(each.numbers[row, column])
            needs = "more than 1 PiB" if table.too_large[number] else "invalid"
            if table.valid[number]:
                needs = bound + format_bytes(int(table.device_bytes[number]), unit)
                needs += f", {answer_text(table, number)}" if landscape.judged else ""
            words = markup(f"{where}: {needs}")
            lines.append(f'<rect {place} fill="{_fill(each, row, column)}"><title>{words}</title></rect>')
    lines.append(_boundary(landscape, each, top))
    bottom = top + CELL * len(each.rows) + 12
    every = -(-len(each.columns) // _LABELS)
    for column in range(0, len(each.columns), every):
        x = LEFT + CELL * column + CELL // 2
        lines.append(f'<text x="{x}" y="{bottom}" text-anchor="middle">{markup(each.columns[column])}</text>')
    lines.append(f'<text x="{LEFT}" y="{bottom + 13}">{markup(landscape.across_name)}</text>')
    down = markup(landscape.down_name)
    lines.append(f'<text x="10" y="{top + CELL - 3}">{down}</text>')
    return lines


def _boundary(landscape: Landscape, each: Map, top: int) -> str:
    """A line to the right of what fits, row by row."""
    if not landscape.judged:
        return ""
    path, before = "", None
    for row, (last, _) in enumerate(each.boundaries()):
        x = LEFT + CELL * (0 if last is None else last + 1)
        path += (
            f"{'M' if before is None else 'H'}{x}"
            + (f" {top}" if before is None else "")
            + f"V{top + CELL * (row + 1)}"
        )
        before = x
    return f'<path d="{path}" fill="none" stroke="{_BOUNDARY}" stroke-width="2"/>'


def _fill(each: Map, row: int, column: int) -> str:
    if not each.valid[row, column]:
        return _NONE
    if each.verdict[row, column] != FITS:
        return _CLOSE if each.verdict[row, column] == CLOSE else _NOT
    share = min(float(each.share[row, column]), 1.0)
    parts = (round(light + (dark - light) * share) for light, dark in zip(_LIGHT, _DARK, strict=True))
    return "#" + "".join(f"{part:02x}" for part in parts)
