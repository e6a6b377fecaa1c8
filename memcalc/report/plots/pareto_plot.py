"""The front of memory against compute as a picture file, drawn by matplotlib, the extra `plot`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from memcalc.documents.recompute import peak_place
from memcalc.ledger.component import Component
from memcalc.recomputation.evaluation import Evaluation
from memcalc.recomputation.recommendation import RecomputeResult
from memcalc.report.plots.bars import BarGroup, BarPart, Panel, RunBar, save_bars
from memcalc.report.plots.markup import heading
from memcalc.report.plots.palette import GREY, LIMIT, color
from memcalc.report.plots.picture import write_picture
from memcalc.report.screens.verdict import subject
from memcalc.units import BYTES_PER_UNIT, Unit, format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_INCHES = (9.0, 5.0)
_NEAR_X, _NEAR_Y = 0.2, 0.05  # of the axes: the words of two marks that are closer would overlap


def save_front(path: Path, planning: RecomputeResult, unit: Unit = "GiB") -> None:
    """Write the picture: the front, or bars of the plans where all of them need the same memory.

    Args:
        path: its suffix decides between PNG and SVG.
        planning: the plan with those that it was chosen among.
        unit: of memory.
    """
    if len({found.evaluation.peak_bytes for found in planning.front}) < 2:
        save_bars(path, *plan_bars(planning, unit))
        return
    write_picture(path, lambda: front_figure(planning, unit))


def front_figure(planning: RecomputeResult, unit: Unit = "GiB") -> Figure:
    """Peak memory against FLOPs that run again: the front, rules of thumb, the plan, and where the budget ends."""
    from matplotlib.figure import Figure

    size, flops = BYTES_PER_UNIT[unit], planning.configured.chain.flops
    figure = Figure(figsize=_INCHES, layout="constrained")
    axes = figure.add_subplot()
    points = [
        (found.evaluation.peak_bytes / size, 100 * found.evaluation.recompute_flops / flops) for found in planning.front
    ]
    ink = color(Component.WEIGHTS)
    axes.step(*zip(*points, strict=True), where="post", color=ink, linewidth=1.2, zorder=2)
    axes.plot(
        *zip(*points, strict=True), "o", color=ink, markersize=4, label="cheapest plans of whole layers", zorder=3
    )
    rules = [(name, found.peak_bytes / size, 100 * found.recompute_flops / flops) for name, found in planning.rules]
    for _, x, y in rules:
        axes.plot([x], [y], "x", color=GREY, zorder=4, clip_on=False)  # "none" is on the axis
    for names, x, y in together(rules):
        axes.annotate(", ".join(names), (x, y), (5, 5), textcoords="offset points", color=GREY, fontsize=9)
    chosen = planning.plan.evaluation
    axes.plot(
        [chosen.peak_bytes / size], [100 * chosen.recompute_flops / flops], "o",
        color=color(Component.LOGITS_AND_LOSS), markersize=9,
        label=f"this plan ({planning.plan.plan.strategy})", zorder=5,
    )  # fmt: skip
    budget = f"budget {format_bytes(planning.budget, unit)}"
    axes.axvline(planning.budget / size, color=LIMIT, linewidth=1.6, label=budget)
    axes.set_title(heading(subject(planning.result).run), loc="left", fontsize=12, fontweight="bold")
    axes.set_xlabel(f"peak of allocated memory, {unit}")
    axes.set_ylabel("recomputed FLOPs, % of a forward")
    axes.margins(x=0.08, y=0.1)  # room for the labels at the ends
    axes.set_ylim(bottom=0)
    axes.grid(color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def together(marks: Sequence[tuple[str, float, float]]) -> list[tuple[list[str], float, float]]:
    """Return names with their place; names that would overlap share one line, at the first of them."""
    width = max((x for _, x, _ in marks), default=0) - min((x for _, x, _ in marks), default=0)
    height = max((y for _, _, y in marks), default=0)
    placed: list[tuple[list[str], float, float]] = []
    for name, x, y in marks:
        near = (
            names
            for names, at, above in placed
            if abs(at - x) <= _NEAR_X * width and abs(above - y) <= _NEAR_Y * height
        )
        found = next(near, None)
        if found is None:
            placed.append(([name], x, y))
        else:
            found.append(name)
    return placed


def plan_bars(planning: RecomputeResult, unit: Unit) -> tuple[str, list[BarGroup]]:
    """Return the title, which says why no plan needs less, and each plan with its memory and what it recomputes."""
    size, flops = BYTES_PER_UNIT[unit], planning.configured.chain.flops
    own = planning.plan
    plans = [(f"this plan ({own.plan.strategy})", own.evaluation), *planning.rules]
    memory = [
        RunBar(name, (BarPart("allocated", color(Component.WEIGHTS), found.peak_bytes / size),), _memory(found, unit),
            planning.budget / size, found.peak_bytes <= planning.budget)
        for name, found in plans
    ]  # fmt: skip
    again = [
        RunBar(name, (BarPart("recomputed", color(Component.ACTIVATIONS), 100 * found.recompute_flops / flops),),
            f"{found.recompute_flops / flops:.1%}")
        for name, found in plans
    ]  # fmt: skip
    title = f"{subject(planning.result).run}. No plan needs less: the peak is in {peak_place(own.evaluation)}"
    panels = (
        Panel(f"peak of allocated memory, {unit}", tuple(memory), "budget"),
        Panel("recomputed FLOPs, % of a forward", tuple(again)),
    )
    return title, [BarGroup("Plan and rules of thumb", panels)]


def _memory(found: Evaluation, unit: Unit) -> str:
    return f"{format_bytes(found.peak_bytes, unit)}, in {peak_place(found)}"
