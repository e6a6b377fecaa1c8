"""Text chart of the address space: one line per segment, scaled to its size, with a letter per block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memcalc.allocator.views import BlockView, SegmentView
from memcalc.events.event import Event
from memcalc.report.labels import label, letter, letter_style, plural
from memcalc.report.plots.palette import UNATTRIBUTED, mark
from memcalc.report.screen import Screen, Span, draw_line
from memcalc.units import Unit, format_bytes, format_number

SHOWN = 20  # segments; the largest ones
FREE, WAITING = ".", "~"


def draw_address_space(
    screen: Screen, segments: Sequence[SegmentView], owners: Mapping[int, Event], unit: Unit, when: str
) -> None:
    """Draw the chart and its legend; nothing if no memory is reserved.

    Args:
        screen: where it is drawn.
        segments: by address.
        owners: the allocation at each address.
        unit: of the sizes.
        when: which moment it is.
    """
    if not segments:
        return
    largest = sorted(segments, key=lambda segment: -segment.total_size)[:SHOWN]
    shown = sorted(largest, key=lambda segment: segment.address)
    draw_line(screen, _title(segments, shown, unit, when), 0, "bold")
    sizes = [format_number(segment.total_size, unit) for segment in shown]
    head = max(map(len, sizes))
    room = max(10, screen.width - 2 - head - 9)
    scale = max(segment.total_size for segment in shown)
    used: dict[str, str] = {}
    for segment, size in zip(shown, sizes, strict=True):
        width = max(1, round(room * segment.total_size / scale))
        bar = _bar(segment, owners, width, used)
        screen.line((f"  {size:>{head}}  {segment.segment_type:5} ", ""), *_colored(bar))
    legend = ", ".join(f"{sign} {text}" for sign, text in sorted(used.items(), key=lambda item: item[1]))
    draw_line(screen, legend, 2, "dim")
    screen.line()


def _title(segments: Sequence[SegmentView], shown: Sequence[SegmentView], unit: Unit, when: str) -> str:
    rest = len(segments) - len(shown)
    left = sum(segment.total_size for segment in segments) - sum(segment.total_size for segment in shown)
    more = f"; {plural(rest, 'smaller one')} of {format_bytes(left, unit)} not shown" if rest else ""
    return f"Address space {when}, by address: {plural(len(segments), 'segment')}, {unit}{more}"


def _bar(segment: SegmentView, owners: Mapping[int, Event], width: int, used: dict[str, str]) -> str:
    """Return one letter per column: that of the block that covers most of it."""
    cells = []
    for column in range(width):
        begin = segment.address + segment.total_size * column // width
        end = segment.address + segment.total_size * (column + 1) // width
        block = max(segment.blocks, key=lambda block: _overlap(block, begin, end))
        cells.append(_sign(block, owners, used))
    return "".join(cells)


def _overlap(block: BlockView, begin: int, end: int) -> int:
    return min(block.address + block.size, end) - max(block.address, begin)


def _sign(block: BlockView, owners: Mapping[int, Event], used: dict[str, str]) -> str:
    if block.state == "inactive":
        used[FREE] = "free"
        return FREE
    if block.state == "active_pending_free":
        used[WAITING] = "freed, but another stream may still use it"
        return WAITING
    owner = owners.get(block.address)
    component = owner.component if owner is not None else None
    sign = mark(component)
    used[sign] = UNATTRIBUTED if component is None else label(component)
    return sign


def _colored(bar: str) -> list[Span]:
    spans: list[Span] = []
    for sign in bar:
        style = letter_style(sign) or ("dim" if sign == FREE else "")
        if spans and spans[-1][1] == style:
            spans[-1] = (spans[-1][0] + sign, style)
        else:
            spans.append((sign, style))
    return spans


assert {letter("weights"), FREE, WAITING} == {"W", ".", "~"}  # no component has these signs
