"""The address space as SVG, and as a self-contained page: every segment a row, every block in its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from memcalc.allocator.views import BlockView, SegmentView
from memcalc.events.event import Event
from memcalc.files import write_text
from memcalc.report.plots.files import check_place
from memcalc.report.plots.markup import markup
from memcalc.report.plots.palette import color, name
from memcalc.units import Unit, format_bytes

SUFFIXES = (".svg", ".html")
LEFT, WIDTH, ROW, GAP, TOP = 150, 1000, 18, 4, 40  # pixels
MOST = 400  # segments; the largest ones
_FREE, _WAITING = "#FFFFFF", "#FFB000"


def write_address_space(
    path: Path, segments: Sequence[SegmentView], owners: Mapping[int, Event], title: str, unit: Unit = "GiB"
) -> None:
    """Write the plot.

    Args:
        path: .svg or .html.
        segments: by address.
        owners: the allocation at each address.
        title: its heading.
        unit: of the sizes.

    Raises:
        InputError: for another suffix.
    """
    check_place(path, SUFFIXES)
    drawing = segments_svg(segments, owners, title, unit)
    if path.suffix.lower() == ".html":
        drawing = (
            f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{markup(title)}</title>\n'
            "<style>body { font-family: sans-serif; margin: 1em; } rect:hover { stroke-width: 2; }</style>\n"
            f"</head>\n<body>\n{drawing}\n</body>\n</html>\n"
        )
    write_text(path, drawing)


def segments_svg(segments: Sequence[SegmentView], owners: Mapping[int, Event], title: str, unit: Unit) -> str:
    """Return an <svg> element; pointing at a block shows its contents."""
    largest = sorted(segments, key=lambda segment: -segment.total_size)[:MOST]
    shown = sorted(largest, key=lambda segment: segment.address)
    scale = max((segment.total_size for segment in shown), default=1)
    rows: list[str] = []
    for number, segment in enumerate(shown):
        top = TOP + number * (ROW + GAP)
        text = f"{segment.segment_type} {format_bytes(segment.total_size, unit)}"
        rows.append(f'<text x="{LEFT - 8}" y="{top + ROW - 5}" text-anchor="end">{markup(text)}</text>')
        rows += [_block(block, segment, owners, top, scale, unit) for block in segment.blocks]
    height = TOP + len(shown) * (ROW + GAP) + 20
    head = f'<text x="{LEFT}" y="22" font-size="15">{markup(title)}</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {height}" role="img" '
        f'aria-label="{markup(title)}" font-family="sans-serif" font-size="11">\n'
        + "\n".join([head, *rows])
        + "\n</svg>\n"
    )


def _block(
    block: BlockView, segment: SegmentView, owners: Mapping[int, Event], top: int, scale: int, unit: Unit
) -> str:
    left = LEFT + WIDTH * (block.address - segment.address) / scale
    width = WIDTH * block.size / scale
    owner = owners.get(block.address)
    component = owner.component if owner is not None else None
    fill = {"inactive": _FREE, "active_pending_free": _WAITING}.get(block.state) or color(component)
    words = [f"{format_bytes(block.size, unit)} at {block.address:#x}"]
    if block.state == "active_allocated":
        words += [name(component), f"requested {block.requested_size:,} bytes", owner.line if owner else ""]
    else:
        words.append("free" if block.state == "inactive" else "freed, but another stream may still use it")
    tip = markup("; ".join(filter(None, words)))
    place = f'x="{left:.2f}" y="{top}" width="{width:.2f}" height="{ROW}"'
    return f'<rect {place} fill="{fill}" stroke="#666666" stroke-width="0.5"><title>{tip}</title></rect>'
