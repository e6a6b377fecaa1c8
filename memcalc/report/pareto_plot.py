"""The front of memory against compute as a picture file, drawn by matplotlib, the extra `plot`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from memcalc.files import writing
from memcalc.ledger.component import Component
from memcalc.planning.planning import Planning
from memcalc.report.plots.markup import heading
from memcalc.report.plots.palette import LIMIT, colour
from memcalc.report.verdict import subject
from memcalc.units import BYTES_PER_UNIT, Unit, format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_INCHES = (9.0, 5.0)
_DOTS = 100
_GREY = "#555555"


def save_front(path: Path, planning: Planning, unit: Unit = "GiB") -> None:
    """Writes the picture; the suffix of the path decides between PNG and SVG."""
    import matplotlib as mpl

    # The same plan gives the same file; a dollar sign in a name is no formula.
    with mpl.rc_context({"svg.hashsalt": "memcalc", "font.size": 10, "text.parse_math": False}):
        metadata: dict[str, Any] = {"Date": None} if path.suffix.lower() == ".svg" else {"Software": None}
        with writing(path) as file:
            front_figure(planning, unit).savefig(file, dpi=_DOTS, metadata=metadata, format=path.suffix.lower()[1:])


def front_figure(planning: Planning, unit: Unit = "GiB") -> Figure:
    """Peak memory against FLOPs that run again: the front, rules of thumb, the plan, and where the budget ends."""
    from matplotlib.figure import Figure

    size, flops = BYTES_PER_UNIT[unit], planning.configured.chain.flops
    figure = Figure(figsize=_INCHES, layout="constrained")
    axes = figure.add_subplot()
    points = [
        (found.evaluation.peak_bytes / size, 100 * found.evaluation.again_flops / flops) for found in planning.front
    ]
    ink = colour(Component.WEIGHTS)
    axes.step(*zip(*points, strict=True), where="post", color=ink, linewidth=1.2, zorder=2)
    axes.plot(
        *zip(*points, strict=True), "o", color=ink, markersize=4, label="cheapest plans of whole layers", zorder=3
    )
    rules: dict[tuple[float, float], list[str]] = {}  # those that come to the same share a mark
    for name, evaluation in planning.rules:
        rules.setdefault((evaluation.peak_bytes / size, 100 * evaluation.again_flops / flops), []).append(name)
    for (x, y), names in rules.items():
        axes.plot([x], [y], "x", color=_GREY, zorder=4)
        axes.annotate(", ".join(names), (x, y), (5, 5), textcoords="offset points", color=_GREY, fontsize=9)
    chosen = planning.found.evaluation
    axes.plot(
        [chosen.peak_bytes / size], [100 * chosen.again_flops / flops], "o", color=colour(Component.LOGITS_AND_LOSS),
        markersize=9, label=f"this plan ({planning.found.plan.strategy})", zorder=5,
    )  # fmt: skip
    budget = f"budget {format_bytes(planning.budget, unit)}"
    axes.axvline(planning.budget / size, color=LIMIT, linewidth=1.6, label=budget)
    axes.set_title(heading(subject(planning.result).partition("\n")[0]), loc="left", fontsize=12, fontweight="bold")
    axes.set_xlabel(f"peak of allocated memory, {unit}")
    axes.set_ylabel("recomputed FLOPs, % of a forward")
    axes.margins(x=0.08, y=0.1)  # room for the labels at the ends
    axes.set_ylim(bottom=0)
    axes.grid(color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure
