"""The report of `recompute` for a chain that a file describes."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.recomputation.batch_gain import Gain
from memcalc.recomputation.chain_file import GIVEN, ChainPlanning
from memcalc.report.screen import GOOD, Screen, draw_grid, draw_line
from memcalc.report.screens.recompute_tables import front_grid, layers_grid, plans_grid, slower
from memcalc.units import Unit, format_bytes


def draw_chain(screen: Screen, planning: ChainPlanning, unit: Unit) -> None:
    """Draw the verdict, the plan next to rules of thumb, the plan by block, the front, and the plan as Python.

    Without a budget the need takes the place of the verdict.
    """
    chain, found = planning.configured.chain, planning.plan
    again = found.evaluation.recompute_flops
    share = again / chain.flops if chain.flops else 0.0
    samples = f", batch {planning.batch:,}" if planning.batch > 1 else ""
    draw_line(screen, f"{planning.name}: {len(chain)} blocks{samples}", 0, "bold")
    screen.line()
    peak = format_bytes(found.evaluation.peak_bytes, unit)
    price = f"recomputes {share:.1%} of a forward, a step is {slower(planning, again)} longer."
    if planning.budget is None:
        draw_line(screen, f"Needs {peak}; {price} Add --gpu or --budget to check whether it fits.", 0)
    else:
        draw_line(screen, f"FITS: {peak} of {format_bytes(planning.budget, unit)}; {price}", 0, GOOD)
    for line in remarks(planning, unit):
        draw_line(screen, line, 2)
    screen.line()
    draw_grid(screen, plans_grid(planning, unit))
    if planning.plan.plan.strategy == GIVEN:
        return  # the user gave it
    draw_grid(screen, layers_grid(planning, unit, "blocks", "Block by block"))
    draw_grid(screen, front_grid(planning, unit))
    screen.line(("The plan, for memcalc.recomputation.modules.planned", "bold"))
    screen.line((f"  {found.plan.items}", ""))


def remarks(planning: ChainPlanning, unit: Unit) -> Iterator[str]:
    """Yield the origin of the budget, and the gap to the optimum."""
    reserve, loss = planning.reserve, planning.plan.loss
    if reserve is not None:
        yield (
            f"A chain has no requests to replay, so the budget is {format_bytes(reserve.usable_bytes, unit)} divided "
            f"by {reserve.ratio:.2f}, the most that {reserve.runs} recorded runs ({reserve.run_type}) reserved for "
            "each allocated byte."
        )
    if loss == 0:
        yield "No plan within the budget recomputes less."
    elif loss is not None:
        yield f"A plan within the budget could recompute at most {loss / planning.configured.chain.flops:.2%} less."
    yield from _gain(planning.gain)


def _gain(gain: Gain | None) -> Iterator[str]:
    if gain is None:
        return
    if not gain.without:
        yield f"Largest batch: {gain.most:,} with this plan, none with everything saved."
        return
    yield (
        f"Largest batch: {gain.most:,} with this plan, {gain.without:,} with everything saved "
        f"({gain.most / gain.without:.1f} times)."
    )
    if gain.pays_below is not None and gain.slow_down > 1:
        yield (
            f"The larger batch gives more samples per second if the GPU reaches less than {gain.pays_below:.0%} of "
            f"its rate with {gain.without:,}."
        )
