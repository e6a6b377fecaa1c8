"""The cheapest plan within a memory budget: exact for short chains, with a bound on the loss for long ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from memcalc.recomputation.chain import Chain
from memcalc.recomputation.evaluation import Evaluation, evaluate
from memcalc.recomputation.plan import Plan, Segment, all_saved
from memcalc.recomputation.strategies.grid import BudgetGrid
from memcalc.recomputation.strategies.lowest_peak import smallest
from memcalc.recomputation.strategies.pareto import ParetoFronts, TooManyPoints, items_of
from memcalc.recomputation.strategies.rules import every_k

EXACT = 24  # maximum blocks for the exact Pareto front
EFFORT = 150_000  # points that it may evaluate, about 10 microseconds each


class OptimalPlan(NamedTuple):
    """A plan, its cost, and a lower bound of the cost of all plans within the budget."""

    plan: Plan  # the plan
    evaluation: Evaluation  # its memory and cost
    bound: int | None  # minimum FLOPs of recomputation of every plan within the budget; None: not computed

    @property
    def loss(self) -> int | None:
        """Maximum FLOPs that a better plan could save: 0 means that there is none."""
        return None if self.bound is None else self.evaluation.recompute_flops - self.bound


def optimal(chain: Chain, budget: int, *, bounded: bool = True) -> OptimalPlan | None:
    """Return the plan with the fewest FLOPs of recomputation within a budget; None: nothing fits.

    Args:
        chain: the chain.
        budget: bytes.
        bounded: whether to compute the bound, which takes as long as the plan itself.
    """
    fitting = [found for found in candidates(chain) if found.evaluation.peak_bytes <= budget]
    if not fitting:
        return None
    best = min(fitting, key=_price)
    if not best.evaluation.recompute_flops:
        return best._replace(plan=best.plan._replace(strategy="optimal"), bound=0)
    exact = _exact(chain, budget, best.evaluation.recompute_flops)
    if exact is not None:
        return exact
    items = _grid_items(BudgetGrid(chain, budget, "up"), budget)
    if items is not None:
        best = min(best, _found(chain, Plan(items, "optimal")), key=_price)
    bound = BudgetGrid(chain, budget, "down").least_recompute_flops(budget) if bounded else None
    return best._replace(plan=best.plan._replace(strategy="optimal"), bound=bound)


def front(chain: Chain, points: int = 20) -> list[OptimalPlan]:
    """Return the Pareto front of memory and compute, from the lowest peak to no recomputation.

    Args:
        chain: the chain.
        points: number of budgets tried, evenly spaced.
    """
    known = list(candidates(chain))
    low = min(found.evaluation.peak_bytes for found in known)
    high = evaluate(chain, all_saved(len(chain))).peak_bytes
    if high > low:
        grid = BudgetGrid(chain, high, "up")
        for number in range(1, points):
            items = _grid_items(grid, low + (high - low) * number // points)
            if items is not None:
                known.append(_found(chain, Plan(items, "optimal")))
    return undominated(known)


def undominated(plans: Sequence[OptimalPlan]) -> list[OptimalPlan]:
    """Return the plans that no other plan beats in both memory and compute, by rising peak."""
    kept: list[OptimalPlan] = []
    for found in sorted(plans, key=lambda found: (found.evaluation.peak_bytes, found.evaluation.recompute_flops)):
        if not kept or found.evaluation.recompute_flops < kept[-1].evaluation.recompute_flops:
            kept.append(found)
    return kept


def candidates(chain: Chain) -> Iterator[OptimalPlan]:
    """Yield plans that are found at no cost: no recomputation, segments of every k, the lowest peak."""
    yield _found(chain, Plan(all_saved(len(chain)), "none"))
    longest = max((stop - start for start, stop in enumerate(chain.reach)), default=0)
    for k in range(1, longest + 1):
        yield _found(chain, every_k(chain, k))
    yield _found(chain, smallest(chain))


def _exact(chain: Chain, budget: int, recompute_flops: int) -> OptimalPlan | None:
    if len(chain) > EXACT:
        return None
    try:
        whole = ParetoFronts(chain, budget, recompute_flops, EFFORT).chain_front
    except TooManyPoints:
        return None
    best = whole[-1]
    return _found(chain, Plan(items_of(best), "optimal"))._replace(bound=best.recompute_flops)


def _grid_items(grid: BudgetGrid, budget: int) -> Segment | None:
    return None if grid.least_recompute_flops(budget) is None else grid.items(budget)


def _found(chain: Chain, plan: Plan) -> OptimalPlan:
    return OptimalPlan(plan, evaluate(chain, plan), None)


def _price(found: OptimalPlan) -> tuple[int, int]:
    return found.evaluation.recompute_flops, found.evaluation.peak_bytes
