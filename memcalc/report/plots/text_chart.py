"""The run drawn in letters, for terminals and logs: as wide as the screen, and readable without color."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby

from memcalc.events.downsampling import DownsampledTimeline, EventInterval
from memcalc.events.memory_curve import MemoryCurve
from memcalc.report.labels import letter_style, percent, plural
from memcalc.report.plots.markup import AxisMark, phase_marks, step_marks
from memcalc.report.plots.palette import mark, name
from memcalc.report.screen import Column, Screen, Span, TextTable, draw_grid, draw_line
from memcalc.units import Unit, format_bytes, format_number

WIDEST = 160  # columns; a wider chart shows no more detail
NARROWEST = 20  # columns; a narrower terminal breaks the lines
ROWS = 16
_LABELED = 4  # rows per number on the axis
_RESERVED = "-"
_LIMIT = "="
_INDENT = 2


def draw_curve(
    screen: Screen, curve: MemoryCurve, unit: Unit = "GiB", rows: int = ROWS, *, legend: bool = True
) -> None:
    """Draw the chart with its axes and legend; one line of text if nothing was allocated.

    Args:
        screen: where to.
        curve: what.
        unit: of the numbers.
        rows: how high the picture is.
        legend: False if a table above explains the letters.
    """
    if not curve.peak_bytes:
        draw_line(screen, "Memory over the run: nothing was allocated.", 0)
        screen.line()
        return
    label = len(format_number(curve.top, unit))
    width = max(NARROWEST, min(screen.width, WIDEST) - _INDENT - label - 2)
    outline = curve.outline(width)
    columns = [outline.stretches[len(outline.stretches) * at // width] for at in range(width)]
    blank = " " * (_INDENT + label)
    draw_line(screen, _title(outline, curve, unit), 0, "bold")
    screen.line((f"{blank}  {_peak_line(columns, outline, curve, unit)}", "bold"))
    cells = [_column(stretch, outline, rows) for stretch in columns]
    for row in reversed(range(rows)):
        value = format_number(outline.top * (row + 1) // rows, unit) if (row + 1) % _LABELED == 0 else ""
        screen.line((f"{' ' * _INDENT}{value:>{label}} |", ""), *_colored(column[row] for column in cells))
    screen.line((f"{' ' * _INDENT}{format_number(0, unit):>{label}} +{'-' * width}", ""))
    for marks in (phase_marks(outline.spans), step_marks(outline.spans)):
        if marks:
            screen.line((f"{blank}  {_ruler(columns, marks)}", "dim"))
    screen.line()
    if legend:
        draw_grid(screen, legend_grid(curve, outline, unit))


def _title(outline: DownsampledTimeline, curve: MemoryCurve, unit: Unit) -> str:
    what = "requested" if curve.allocated is None else "allocated (letters)"
    what += f" and reserved ({_RESERVED})" * (curve.reserved is not None)
    what += f"; {_LIMIT} is the usable memory" * (outline.limit is not None)
    died = ", until it ran out of memory" if outline.failed else ""
    events = plural(outline.length, "event")
    return f"Memory over the run{died}: {unit} {what}. Each column shows the peak of its part of {events}."


def _peak_line(columns: Sequence[EventInterval], outline: DownsampledTimeline, curve: MemoryCurve, unit: Unit) -> str:
    """ "v peak 3.20 GiB in forward_1", the v above the column of the peak; on its left where the right is too short."""
    peak = outline.stretches[outline.peak]
    at = columns.index(peak)
    phase = curve.phase_of(peak.event)
    text = f"peak {format_bytes(peak.total, unit)}{f' in {phase}' if phase else ''}"
    if at + 2 + len(text) <= len(columns):
        return f"{' ' * at}v {text}"
    return f"{text} v".rjust(at + 1)


def _column(interval: EventInterval, outline: DownsampledTimeline, rows: int) -> str:
    """One column from the bottom up: each cell has the letter of the component at its middle."""
    levels = list(accumulate(interval.components))
    cells = []
    for row in range(rows):
        place = bisect_right(levels, outline.top * (2 * row + 1) // (2 * rows))
        cells.append(mark(outline.components[place]) if place < len(levels) else " ")
    for size, sign in ((interval.reserved, _RESERVED), (outline.limit, _LIMIT)):
        if size is not None:
            row = min(rows - 1, size * rows // outline.top)
            cells[row] = sign if cells[row] == " " else cells[row]
    return "".join(cells)


def _colored(cells: Iterable[str]) -> list[Span]:
    return [("".join(run), letter_style(sign)) for sign, run in groupby(cells)]


def _ruler(columns: Sequence[EventInterval], marks: Sequence[AxisMark]) -> str:
    """Words under the picture, each from where it begins, cut off where the next one does."""
    line = [" "] * len(columns)
    for word, begin, end in marks:
        places = [at for at, interval in enumerate(columns) if begin <= interval.begin < end]
        if places:
            room = len(places) - 1
            line[places[0] : places[-1] + 1] = f"|{word[:room]:<{room}}"
    return "".join(line).rstrip()


def legend_grid(curve: MemoryCurve, outline: DownsampledTimeline, unit: Unit) -> TextTable:
    """Return the legend of the letters, with the bytes of each component at the peak."""
    peak = outline.stretches[outline.peak]
    rows = [
        (mark(component), name(component), format_number(size, unit), percent(size, peak.total))
        for component, size in zip(outline.components, peak.components, strict=True)
    ]
    rows.append(("", "allocated" if curve.allocated is not None else "requested", format_number(peak.total, unit), ""))
    strong = frozenset({len(rows) - 1})
    if curve.reserved is not None:
        held = curve.reserved[curve.peak_event]
        rows.append((_RESERVED, "reserved", format_number(held, unit), "the dashed line"))
    columns = (Column(""), Column("component"), Column(f"{unit} at the peak", right=True), Column("share"))
    return TextTable("", columns, rows, strong, letters=True)
