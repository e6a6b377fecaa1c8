"""The optimum against every plan there is."""

import time

import pytest
from hypothesis import HealthCheck, given, settings

from memcalc.recomputation.chain import Chain, simple_block
from memcalc.recomputation.evaluation import evaluate, evaluate_without_recomputation
from memcalc.recomputation.plan import Plan, all_saved
from memcalc.recomputation.strategies.grid import BudgetGrid
from memcalc.recomputation.strategies.lowest_peak import smallest
from memcalc.recomputation.strategies.optimal import front, optimal
from memcalc.recomputation.strategies.pareto import ParetoFronts, TooManyPoints, items_of
from tests.recomputation.chains import brute_front, random_chains


def check_against_all_plans(chain: Chain) -> None:
    """The exact front is that of all plans, its plans cost what it says, and `optimal` finds each of them."""
    expected = brute_front(chain)
    points = ParetoFronts(chain).chain_front

    assert [point[:2] for point in points] == expected
    for point in points:
        evaluation = evaluate(chain, items_of(point))
        assert (evaluation.peak_bytes, evaluation.recompute_flops) == point[:2]
    assert evaluate(chain, smallest(chain)).peak_bytes == expected[0][0]
    assert optimal(chain, expected[0][0] - 1) is None
    for budget, again in expected:
        found = optimal(chain, budget)
        assert found is not None
        assert (found.evaluation.recompute_flops, found.loss) == (again, 0)
        assert found.evaluation.peak_bytes <= budget


@settings(deadline=None)
@given(random_chains(6))
def test_optimal_is_the_best_of_all_plans(chain: Chain) -> None:
    check_against_all_plans(chain)


@pytest.mark.long
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(random_chains(10, largest=10**9))
def test_optimal_is_the_best_of_all_plans_of_ten_blocks(chain: Chain) -> None:
    check_against_all_plans(chain)


@settings(max_examples=40, deadline=None)
@given(random_chains(5, largest=400))
def test_the_grid_is_never_above_the_budget_and_its_bound_never_above_the_optimum(chain: Chain) -> None:
    expected = brute_front(chain)
    budgets = {expected[0][0], (expected[0][0] + expected[-1][0]) // 2, expected[-1][0]}
    for budget in budgets:
        best = min(again for peak, again in expected if peak <= budget)
        for slots in (5, 40, 100_000):
            up, down = BudgetGrid(chain, budget, "up", slots), BudgetGrid(chain, budget, "down", slots)
            found, bound = up.least_recompute_flops(budget), down.least_recompute_flops(budget)
            assert bound is not None
            assert bound <= best
            if slots == 100_000 and up.fine.unit == up.parts == 1:
                assert found == best == bound  # a slot is a byte: nothing is rounded
            if found is not None:
                evaluation = evaluate(chain, up.items(budget))
                assert evaluation.recompute_flops <= found
                assert evaluation.peak_bytes <= budget


def long_chain(layers: int) -> Chain:
    """Layers no two of which are identical."""
    sizes = [32_000_000 + 7_919 * (index * index % 1009) * 13 for index in range(layers)]
    blocks = [simple_block(f"layer {i}", 2_000_000, size, 2_000_000, size // 1000, 400) for i, size in enumerate(sizes)]
    head = simple_block("head", 2_000_000, 30_000_000, 0, 5000, 4_000_000, recomputable=False)
    return Chain((*blocks, head), resident=10**9)


def test_long_chains_have_their_loss_stated() -> None:
    chain = long_chain(40)
    low, high = evaluate(chain, smallest(chain)).peak_bytes, evaluate_without_recomputation(chain).peak_bytes
    budget = (low + high) // 2
    found = optimal(chain, budget)

    assert found is not None
    assert found.evaluation.peak_bytes <= budget
    assert found.loss is not None
    assert 0 <= found.loss <= chain.flops // 100


def test_the_front_falls() -> None:
    plans = front(long_chain(30), points=10)

    peaks = [found.evaluation.peak_bytes for found in plans]
    costs = [found.evaluation.recompute_flops for found in plans]
    assert peaks == sorted(peaks)
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == 0
    assert len(plans) >= 10


@pytest.mark.long
def test_planning_128_blocks_takes_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    """The bars: 2 s a budget, 10 s the front of 20; of this process, since other ones may run beside it."""
    chain = long_chain(127)
    budget = evaluate_without_recomputation(chain).peak_bytes // 2
    start = time.process_time()
    found = optimal(chain, budget)
    one = time.process_time() - start
    start = time.process_time()
    plans = front(chain, 20)
    several = time.process_time() - start
    with capsys.disabled():
        print(f"\n128 blocks: {one:.2f} s for one budget, {several:.2f} s for the front of {len(plans)}")

    assert found is not None
    assert one < 2
    assert several < 10


def test_effort_is_limited() -> None:
    with pytest.raises(TooManyPoints):
        _ = ParetoFronts(long_chain(20), effort=100).chain_front


def test_a_budget_for_everything_recomputes_nothing() -> None:
    chain = long_chain(30)
    found = optimal(chain, evaluate_without_recomputation(chain).peak_bytes)

    assert found is not None
    assert found.plan == Plan(all_saved(31), "optimal")
    assert found.loss == 0
