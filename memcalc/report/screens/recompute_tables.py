"""The tables of a plan: compared with the rules of thumb, block by block, and the front of memory against compute."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from memcalc.documents.recompute import peak_place
from memcalc.recomputation.batch_gain import slow_down
from memcalc.recomputation.evaluation import Evaluation
from memcalc.recomputation.plan import Segment, depth, leaves, recompute_counts
from memcalc.report.screen import Column, TextTable, numeric, small_bar
from memcalc.units import Unit, format_number

if TYPE_CHECKING:
    from memcalc.recomputation.chain_file import ChainPlanning
    from memcalc.recomputation.recommendation import RecomputeResult

    TableSource = RecomputeResult | ChainPlanning  # a plan of a configuration, or of a chain from a file

BAR = 24  # letters of the longest bar


def plans_grid(planning: TableSource, unit: Unit) -> TextTable:
    """Return the plan next to saving everything and the rules of thumb."""
    own = planning.plan.evaluation
    rows = [(f"this plan ({planning.plan.plan.strategy})", own), *planning.rules]
    columns = (
        Column("strategy"),
        *numeric(f"peak {unit}", "saved", "recomputed", "longer"),
        Column("peak in", wrap=True),
    )
    cells = [(name, *_figures(planning, evaluation, unit), peak_place(evaluation)) for name, evaluation in rows]
    return TextTable("Plan and rules of thumb, peaks of allocated memory", columns, cells, frozenset({0}))


def _figures(planning: TableSource, evaluation: Evaluation, unit: Unit) -> tuple[str, ...]:
    recompute_flops = evaluation.recompute_flops
    return (
        format_number(evaluation.peak_bytes, unit),
        format_number(evaluation.saved_bytes, unit),
        f"{recompute_flops / planning.configured.chain.flops:.1%}",
        slower(planning, recompute_flops),
    )


def layers_grid(planning: TableSource, unit: Unit, what: str = "layers", title: str = "Layer by layer") -> TextTable:
    """Return the plan, one row per run of layers that are treated the same."""
    rows: list[tuple[str, ...]] = []
    configured = planning.configured
    inside = [item for item in planning.plan.plan.items if configured.first <= next(leaves(item)) < configured.stop]
    for alike in _alike(inside):
        numbers = [block for item in alike for block in leaves(item)]
        low, high = numbers[0] - configured.first, numbers[-1] - configured.first
        rows.append(
            (
                f"{low}" if low == high else f"{low} to {high}",
                _how(alike),
                format_number(sum(_held(planning, item) for item in alike), unit),
                f"{sum(_again(planning, item) for item in alike) / configured.chain.flops:.1%}",
            )
        )
    columns = (Column(what), Column("plan"), *numeric(f"saved {unit}", "recomputed"))
    return TextTable(title, columns, rows)


def _alike(items: list[int | Segment]) -> Iterator[list[int | Segment]]:
    """Yield runs of neighboring layers that are saved, or that are recomputed separately."""
    for size, run in groupby(items, lambda item: 0 if isinstance(item, int) else len([*leaves(item)])):
        alike = [*run]
        yield from [alike] if size <= 1 else ([item] for item in alike)


def _how(alike: list[int | Segment]) -> str:
    item = alike[0]
    if isinstance(item, int):
        return "saved"
    if len([*leaves(item)]) == 1:
        return "recomputed" if len(alike) == 1 else "recomputed separately"
    if depth(item):
        return f"one segment, in {depth((item,))} levels: {_nested(item)}"
    return "one segment"


def _held(planning: TableSource, item: int | Segment) -> int:
    """Return the bytes that an item saves until the end of forward: its input, and tensors inside it."""
    blocks = planning.configured.chain.blocks
    if isinstance(item, int):
        return blocks[item].input_bytes + blocks[item].inside_bytes
    return blocks[next(leaves(item))].input_bytes + sum(blocks[block].released_late_bytes for block in leaves(item))


def _again(planning: TableSource, item: int | Segment) -> int:
    """FLOPs of an item that run again."""
    blocks = planning.configured.chain.blocks
    if isinstance(item, int):
        return 0
    if len(item) == 1 and isinstance(item[0], int) and (alone := blocks[item[0]].recompute_flops) is not None:
        return alone
    return sum(blocks[block].flops * often for block, often in recompute_counts((item,)).items())


def _nested(item: Segment) -> str:
    return "[" + " ".join("." if isinstance(inner, int) else _nested(inner) for inner in item) + "]"


def front_grid(
    planning: TableSource, unit: Unit, which: str = "", marks: tuple[str, str] = ("fits", "fits")
) -> TextTable:
    """Memory against compute: each plan is the cheapest that was found for its memory.

    Args:
        planning: the answer.
        unit: of memory.
        which: kind of plans these are.
        marks: label of the result, and of other plans that allocate no more than a plan that fits.
    """
    most = max((found.evaluation.recompute_flops for found in planning.front), default=0)
    rows = []
    strong = set()
    for number, found in enumerate(planning.front):
        recompute_flops = found.evaluation.recompute_flops
        fits = planning.budget is None or found.evaluation.peak_bytes <= planning.budget
        if fits and recompute_flops >= planning.plan.evaluation.recompute_flops:
            strong = {number}
        rows.append(
            (
                format_number(found.evaluation.peak_bytes, unit),
                marks[found.evaluation != planning.plan.evaluation] if fits else "",
                f"{recompute_flops / planning.configured.chain.flops:.1%}",
                slower(planning, recompute_flops),
                small_bar(recompute_flops, most, BAR),
            )
        )
    heads = (Column(f"peak {unit}", right=True), Column(""), Column("recomputed", right=True))
    columns = (*heads, Column("step longer", right=True), Column(""))
    return TextTable(", ".join(filter(None, ("Memory against compute", which))), columns, rows, frozenset(strong))


def slower(planning: TableSource, recompute_flops: int) -> str:
    """Return how much longer a step takes, as a percentage."""
    return f"{slow_down(planning.configured.chain.flops, recompute_flops) - 1:.1%}"
