"""The run as a picture file: PNG for screens, SVG for papers. Needs matplotlib, the extra `plot`."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from memcalc.events.downsampling import DownsampledTimeline
from memcalc.events.memory_curve import MemoryCurve
from memcalc.report.labels import plural
from memcalc.report.plots.markup import AxisMark, drawable, heading, phase_marks, step_marks
from memcalc.report.plots.palette import GREY, LIMIT, RESERVED, color, name
from memcalc.report.plots.picture import write_picture
from memcalc.units import BYTES_PER_UNIT, Unit, format_bytes, format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STRETCHES = 1000  # about one for each pixel of the picture's width
_INCHES = (12.0, 6.0)  # at 100 dots an inch: 1200 x 600
_PER_LETTER = 6.6  # pixels that a letter of an axis label takes at 9 points, at most
_SEPARATED = 6.0  # pixels


def save_figure(path: Path, curve: MemoryCurve, title: str, unit: Unit = "GiB") -> None:
    """Write the plot as PNG or SVG, by the suffix of the path."""
    write_picture(path, lambda: curve_figure(curve, title, unit))


def curve_figure(curve: MemoryCurve, title: str, unit: Unit = "GiB") -> Figure:
    """Return a figure: the stacked components, reserved memory above, phases below, the peak with its value."""
    from matplotlib.figure import Figure

    outline = curve.outline(STRETCHES)
    figure = Figure(figsize=_INCHES, layout="constrained")
    axes = figure.add_subplot()
    size = BYTES_PER_UNIT[unit]
    if outline.stretches:
        _stack(axes, outline, size)
        _peak(axes, curve, outline, unit)
    axes.set_title(heading(title), loc="left", fontsize=12, fontweight="bold")
    what = "requested" if curve.allocated is None else "allocated"
    axes.set_ylabel(f"{unit} {what}")
    axes.set_xlim(0, max(outline.length, 1))
    axes.set_ylim(0, max(outline.top, 1) / size * 1.12)  # room for the words at the peak
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if outline.limit is not None:
        axes.axhline(outline.limit / size, color=LIMIT, linewidth=1.6, label="usable GPU memory", zorder=4)
    _phases(axes, outline)
    _legend(axes, outline, unit)
    return figure


def _stack(axes: Axes, outline: DownsampledTimeline, size: int) -> None:
    """Draw step curves: between two events nothing changes. The last value is drawn to the end of the axis."""
    stretches = (*outline.stretches, outline.stretches[-1])
    places = [interval.begin for interval in outline.stretches] + [outline.length]
    below = [0.0] * len(places)
    for at, component in enumerate(outline.components):
        above = [level + interval.components[at] / size for level, interval in zip(below, stretches, strict=True)]
        axes.fill_between(
            places, below, above, step="post", color=color(component), linewidth=0, label=name(component), zorder=2
        )
        below = above
    axes.step(places, below, where="post", color="#333333", linewidth=0.6, zorder=3)
    if stretches[0].reserved is not None:
        held = [(interval.reserved or 0) / size for interval in stretches]
        axes.step(places, held, where="post", color=RESERVED, linewidth=1.2, linestyle=(0, (4, 2)), label="reserved")


def _peak(axes: Axes, curve: MemoryCurve, outline: DownsampledTimeline, unit: Unit) -> None:
    """Draw a dot at the peak, its value and phase on the side with more space, and mark an out-of-memory error."""
    size = BYTES_PER_UNIT[unit]
    peak = outline.stretches[outline.peak]
    x, y = peak.event + 0.5, peak.total / size
    phase = curve.phase_of(peak.event)
    right = peak.event > outline.length / 2
    axes.plot([x], [y], marker="o", markersize=5, color="black", zorder=5)
    axes.annotate(
        f"peak {format_bytes(peak.total, unit)}{f' in {drawable(phase)}' if phase else ''}",
        (x, y),
        xytext=(x + (-1 if right else 1) * outline.length * 0.02, outline.top / size * 1.08),
        ha="right" if right else "left",
        va="center",
        fontweight="bold",
        arrowprops={"arrowstyle": "-", "color": "black", "linewidth": 0.8},
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 2},  # lines of phases pass behind the words
        zorder=6,
    )
    if outline.failed:
        axes.axvline(outline.length, color="black", linewidth=2.5, clip_on=False)
        axes.annotate(
            "out of memory", (outline.length, 0.02), (-6, 0), xycoords=("data", "axes fraction"), rotation=90,
            textcoords="offset points", ha="right", va="bottom", fontweight="bold", zorder=6,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.5},
        )  # fmt: skip


def _phases(axes: Axes, outline: DownsampledTimeline) -> None:
    """Phases as words under the axis, upright where they are narrow, and steps in a line below them."""
    phases, steps = phase_marks(outline.spans), step_marks(outline.spans)
    axes.set_xticks([mark.begin for mark in phases], [""] * len(phases))
    axes.tick_params(axis="x", length=5, color=GREY)
    for left, right in pairwise(steps):
        assert left.end == right.begin
        axes.axvline(right.begin, color=GREY, linewidth=0.9, zorder=4)
    pixels = 900 / max(outline.length, 1)  # what the axes keep of 1200, about
    for mark in phases:
        if (mark.end - mark.begin) * pixels >= _SEPARATED:  # lines close together would hide the areas between them
            axes.axvline(mark.begin, color="white", linewidth=0.6, alpha=0.5, zorder=2.5)
    upright = [mark for mark in phases if not _fits(mark, pixels) and (mark.end - mark.begin) * pixels >= 11]
    for mark in phases:
        if _fits(mark, pixels) or mark in upright:
            turned = 90 if mark in upright else 0
            _word(axes, mark, -7, turned, GREY)
    deepest = max((len(mark.word) for mark in upright), default=2)
    for mark in steps:
        if _fits(mark, pixels):
            _word(axes, mark, -14 - deepest * 5, 0, "black")
    axes.set_xlabel(
        f"allocations and releases in order: {plural(outline.length, 'event')}",
        color=GREY,
        labelpad=12 + deepest * 5 + 14 * bool(steps),
    )


def _fits(mark: AxisMark, pixels: float) -> bool:
    return (mark.end - mark.begin) * pixels >= len(mark.word) * _PER_LETTER


def _word(axes: Axes, mark: AxisMark, points: float, turned: int, ink: str) -> None:
    axes.annotate(
        mark.word, ((mark.begin + mark.end) / 2, 0), (0, points), xycoords=("data", "axes fraction"), color=ink,
        textcoords="offset points", ha="center", va="top", rotation=turned, fontsize=9, annotation_clip=False,
    )  # fmt: skip


def _legend(axes: Axes, outline: DownsampledTimeline, unit: Unit) -> None:
    """Draw the legend next to the plot, from the top of the stack down, each entry with its size at the peak."""
    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        return
    peak = outline.stretches[outline.peak]
    sizes = {
        name(component): format_number(count, unit)
        for component, count in zip(outline.components, peak.components, strict=True)
    }
    words = [f"{label}  {sizes[label]}" if label in sizes else label for label in labels]
    axes.legend(
        handles[::-1], words[::-1], title=f"{unit} at the peak", loc="upper left", bbox_to_anchor=(1.005, 1),
        frameon=False, fontsize=9, title_fontsize=9, alignment="left", borderaxespad=0, handlelength=1.6,
    )  # fmt: skip
