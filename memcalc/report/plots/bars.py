"""Several runs as bars of their parts, one below the other: PNG for screens, SVG for papers. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, NamedTuple

from memcalc.report.plots.markup import drawable
from memcalc.report.plots.palette import GREY, LIMIT
from memcalc.report.plots.picture import DOTS_PER_INCH, write_picture
from memcalc.text import shortened_in_the_middle

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH = 12.0  # inches
_ROW = 0.36  # inches of a bar with the gap to the next
_AROUND = 0.75  # inches of a block's title and axis
_LEGEND_ROW = 0.24  # inches
_IN_A_ROW = 7  # words of the legend
_TITLE = 110  # letters of a line above the picture
_TICKS = 6  # of an axis, at most
_LABEL = 46  # letters in a line before a bar
_LINES = 2  # of them
_PER_LETTER = 6.6  # pixels at 9 points, at most
_GAP = 12  # pixels from a bar to its words, and behind them
_LEAST = 0.3  # of an axis: what bars keep, however long their words are


class BarPart(NamedTuple):
    """A piece of a bar."""

    name: str
    color: str
    size: float


class RunBar(NamedTuple):
    """One run: its parts, the words after them, where they should end (None: nowhere), and whether the run fits."""

    label: str
    parts: tuple[BarPart, ...]
    caption: str
    limit: float | None = None
    fits: bool = True


class Panel(NamedTuple):
    """Bars of one quantity; the axis names its unit, and `limit` is where bars should end."""

    axis: str
    bars: tuple[RunBar, ...]
    limit: str = "usable GPU memory"


class BarGroup(NamedTuple):
    """Runs that are compared, in one quantity or in two side by side, with the same labels on the bars."""

    title: str
    panels: tuple[Panel, ...]


def save_bars(path: Path, title: str, blocks: Sequence[BarGroup]) -> None:
    """Write the picture; the suffix of the path decides between PNG and SVG."""
    write_picture(path, lambda: bars_figure(title, blocks))


def bars_figure(title: str, blocks: Sequence[BarGroup]) -> Figure:
    """Return the blocks below each other, each as high as its bars, with one legend for all."""
    from matplotlib.figure import Figure

    heights = [_AROUND + _ROW * len(block.panels[0].bars) for block in blocks]
    legend = _handles(blocks)
    foot = _LEGEND_ROW * -(-len(legend) // _IN_A_ROW) + 0.1
    lines = fill(drawable(title), _TITLE)
    head = 0.3 * (lines.count("\n") + 1) + 0.1
    figure = Figure(figsize=(_WIDTH, sum(heights) + head + foot), layout="constrained")
    if not blocks:
        figure.suptitle(lines, x=0.01, ha="left", fontsize=12, fontweight="bold")
        return figure
    body, below = figure.subfigures(2, 1, squeeze=False, height_ratios=[sum(heights) + head, foot])[:, 0]
    body.suptitle(lines, x=0.01, ha="left", fontsize=12, fontweight="bold")
    rows = body.subfigures(len(blocks), 1, height_ratios=heights, squeeze=False)[:, 0]
    for row, block in zip(rows, blocks, strict=True):
        width_ratios = (3, 2)[: len(block.panels)]
        found = row.subplots(1, len(block.panels), squeeze=False, sharey=True, width_ratios=width_ratios)[0]
        labels = [_label(bar) for bar in block.panels[0].bars]
        before = _PER_LETTER * max(len(line) for label in labels for line in label.splitlines())
        for axes, panel, share in zip(found, block.panels, width_ratios, strict=True):
            _draw(axes, panel, labels, (_WIDTH * DOTS_PER_INCH - before) * share / sum(width_ratios))
        found[0].set_title(block.title, loc="left", fontsize=10)
    below.legend(handles=legend, loc="center", ncols=_IN_A_ROW, frameon=False, fontsize=9, handlelength=1.2)
    return figure


def _label(bar: RunBar) -> str:
    return fill(drawable(shortened_in_the_middle(bar.label, _LINES * _LABEL)), _LABEL)


def _draw(axes: Axes, panel: Panel, labels: Sequence[str], pixels: float) -> None:
    """Draw the bars from the top down, each with its words after it.

    Args:
        axes: where to.
        panel: what.
        labels: before the bars.
        pixels: the width of the axes, about.
    """
    places = range(len(panel.bars))
    shares = [max(_LEAST, 1 - (len(bar.caption) * _PER_LETTER + 2 * _GAP) / pixels) for bar in panel.bars]
    reach = max((_length(bar) / share for bar, share in zip(panel.bars, shares, strict=True)), default=0.0) or 1.0
    for place, bar in zip(places, panel.bars, strict=True):
        left = 0.0
        for part in bar.parts:
            axes.barh(place, part.size, left=left, color=part.color, height=0.72, linewidth=0, zorder=2)
            left += part.size
        if bar.limit is not None:
            axes.plot([bar.limit] * 2, [place - 0.46, place + 0.46], color=LIMIT, linewidth=1.8, zorder=3)
        axes.annotate(
            drawable(bar.caption), (_length(bar), place), (5, 0), textcoords="offset points", va="center", fontsize=9,
            color="black" if bar.fits else LIMIT,
        )  # fmt: skip
    axes.set_yticks([*places], labels, fontsize=9)
    axes.set_ylim(len(panel.bars) - 0.4, -0.6)
    axes.set_xlim(0, reach)
    axes.locator_params(axis="x", nbins=_TICKS)
    axes.set_xlabel(panel.axis, color=GREY, fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _length(bar: RunBar) -> float:
    return max(sum(part.size for part in bar.parts), bar.limit or 0.0)


def _handles(blocks: Sequence[BarGroup]) -> list[Any]:
    """Return what the legend shows: each part once, and the limit."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    bars = [*_bars(blocks)]
    colors = {part.name: part.color for bar in bars for part in bar.parts if part.name}
    handles: list[Any] = [Patch(color=color, label=name) for name, color in colors.items()]
    limits = {panel.limit for block in blocks for panel in block.panels if any(bar.limit for bar in panel.bars)}
    handles += [Line2D([], [], color=LIMIT, linewidth=1.8, label=limit) for limit in sorted(limits)]
    return handles


def _bars(blocks: Iterable[BarGroup]) -> Iterator[RunBar]:
    return chain.from_iterable(panel.bars for block in blocks for panel in block.panels)
