"""The run as one self-contained HTML page: hover over the plot for points in time, over the legend for components."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any

from memcalc.events.downsampling import DownsampledTimeline
from memcalc.events.memory_curve import MemoryCurve
from memcalc.ledger.component import Component
from memcalc.report.labels import percent, plural
from memcalc.report.plots.markup import markup, script_data
from memcalc.report.plots.palette import color, name
from memcalc.report.plots.svg import LEFT, WIDTH, curve_svg
from memcalc.report.screen import TextTable
from memcalc.units import BYTES_PER_UNIT, DECIMALS, Unit, format_bytes, format_number

STRETCHES = 1000  # about one for each pixel
STRETCHES_OF_PART = 300  # a notebook keeps the text of every output

_PAPER = "background:#fff;color:#000;padding:4px"  # also where the notebook is dark


def curve_page(curve: MemoryCurve, title: str, unit: Unit = "GiB", tables: Iterable[TextTable] = ()) -> str:
    """Return the HTML page of a memory curve.

    Args:
        curve: the memory curve to draw.
        title: its heading.
        unit: of all numbers.
        tables: what else to show, below the legend.
    """
    outline = curve.outline(STRETCHES)
    template = files("memcalc.report.plots").joinpath("page.html").read_text(encoding="utf-8")
    parts = {
        "TITLE": markup(title),
        "SUBTITLE": markup(_subtitle(curve, outline, unit)),
        "PICTURE": curve_svg(curve, outline, unit),
        "TABLES": _legend(curve, outline, unit) + "".join(map(html_table, tables)),
        "DATA": script_data(_data(curve, outline, unit)),
    }
    return re.sub(r"%([A-Z]+)%", lambda match: parts[match[1]], template)


def curve_part(curve: MemoryCurve, title: str, unit: Unit = "GiB", tables: Iterable[TextTable] = ()) -> str:
    """Return the picture and tables as a part of somebody's page: a notebook's output. It needs no script.

    Args:
        curve: the memory curve to draw.
        title: a line above the picture.
        unit: of all numbers.
        tables: shown below the legend.
    """
    outline = curve.outline(STRETCHES_OF_PART)
    parts = [curve_svg(curve, outline, unit), _legend(curve, outline, unit), *map(html_table, tables)]
    return f'<div style="{_PAPER}">\n<p>{markup(title)}</p>\n{"".join(parts)}</div>'


def curve_plot(curve: MemoryCurve, unit: Unit = "GiB") -> str:
    """Return the picture with its colors named below it, as a part of somebody's page. It needs no script."""
    outline = curve.outline(STRETCHES_OF_PART)
    names = [f"{_swatch(component)}{name(component)}" for component in reversed(outline.components)]
    names += ["dashed: reserved"] if curve.reserved is not None else []
    return f'<div style="{_PAPER}">\n{curve_svg(curve, outline, unit)}\n<p>{" &ensp; ".join(names)}</p></div>'


def _subtitle(curve: MemoryCurve, outline: DownsampledTimeline, unit: Unit) -> str:
    phase = curve.phase_of(curve.peak_event)
    where = f" in {phase}" if phase else ""
    died = " The run ran out of memory." if outline.failed else ""
    events = plural(outline.length, "event")
    return f"Peak {format_bytes(curve.peak_bytes, unit)} {_verb(curve)}{where}; {events} in order.{died}"


def _verb(curve: MemoryCurve) -> str:
    return "requested" if curve.allocated is None else "allocated"


def _data(curve: MemoryCurve, outline: DownsampledTimeline, unit: Unit) -> dict[str, Any]:
    """Return the data for the pointer: for each interval its point, its parts, and its operator."""
    stretches = [
        [
            interval.begin,
            interval.end,
            interval.event,
            interval.total,
            list(interval.components),
            interval.reserved,
            curve.phase_of(interval.event),
            " ".join(part for part in (event.operator, event.module, event.line) if part),
        ]
        for interval, event in zip(outline.stretches, outline.events, strict=True)
    ]
    return {
        "unit": unit,
        "unit_bytes": BYTES_PER_UNIT[unit],
        "decimals": DECIMALS[unit],
        "left": LEFT,
        "width": WIDTH,
        "events": outline.length,
        "components": [name(component) for component in outline.components],
        "total": _verb(curve),
        "stretches": stretches,
    }


def _legend(curve: MemoryCurve, outline: DownsampledTimeline, unit: Unit) -> str:
    """Return the components from the top of the stack down, with the bytes of each at the peak."""
    if not outline.stretches:
        return ""
    peak = outline.stretches[outline.peak]
    rows = [
        f'<tr data-part="{name(component)}"><td>{_swatch(component)}{name(component)}</td>'
        f'<td class="right">{format_number(size, unit)}</td>'
        f'<td class="right">{markup(percent(size, peak.total))}</td></tr>'
        for component, size in reversed(list(zip(outline.components, peak.components, strict=True)))
    ]
    total = format_number(peak.total, unit)
    rows.append(f'<tr class="strong"><td>{_verb(curve)}</td><td class="right">{total}</td><td></td></tr>')
    if curve.reserved is not None:
        held = format_number(curve.reserved[curve.peak_event], unit)
        rows.append(f'<tr><td>reserved (dashed)</td><td class="right">{held}</td><td></td></tr>')
    head = f'<tr><th>component</th><th class="right">{unit}</th><th class="right">share</th></tr>'
    return f"<h2>At the peak</h2>\n<table>\n{head}\n{_lines(rows)}</table>\n"


def _swatch(component: Component | None) -> str:
    size = "display:inline-block;width:.9em;height:.9em;margin-right:.45em;border:1px solid #0002"
    return f'<span class="swatch" style="{size};background:{color(component)}"></span>'


def html_table(grid: TextTable) -> str:
    """Return a table with its title as a heading."""

    def row(cells: Sequence[str], tag: str, kind: str = "") -> str:
        right = ' class="right"'
        inside = "".join(
            f"<{tag}{right * column.right}>{markup(cell)}</{tag}>"
            for column, cell in zip(grid.columns, cells, strict=True)
        )
        return f"<tr{kind}>{inside}</tr>"

    rows = [row([column.head for column in grid.columns], "th")] if grid.head else []
    rows += [row(cells, "td", ' class="strong"' * (at in grid.strong)) for at, cells in enumerate(grid.rows)]
    title = f"<h2>{markup(grid.title)}</h2>\n" if grid.title else ""
    legend = f"<p>{markup(grid.legend)}</p>\n" if grid.legend else ""
    return f"{title}<table>\n{_lines(rows)}</table>\n{legend}"


def _lines(rows: Iterable[str]) -> str:
    return "".join(f"{row}\n" for row in rows)
