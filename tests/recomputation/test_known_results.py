"""What the literature knows about plans, as relations that ours must satisfy."""

from math import comb, isqrt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memcalc.recomputation.evaluation import evaluate
from memcalc.recomputation.strategies.grid import BudgetGrid
from memcalc.recomputation.strategies.optimal import optimal
from memcalc.recomputation.strategies.pareto import ParetoFronts, items_of
from memcalc.recomputation.strategies.rules import best_k, every_k, every_layer, save_everything, square_root
from tests.recomputation.chains import steps, uniform

# Griewank and Walther (2000), proposition 1: steps, states kept at most, forward steps that run again.
REVOLVE = [(10, 3, 15), (10, 2, 20), (32, 4, 75), (32, 6, 60), (96, 5, 300), (96, 10, 210), (100, 13, 185)]


def extra_forwards(length: int, states: int) -> int:
    """r·l - C(c + r, c + 1), with the least r for which C(c + r, c) >= l: no step is recomputed more often than r times.

    Source: Griewank and Walther, ACM Trans. Math. Softw. 26(1), 2000; the c states include the first one.
    """
    often = 0
    while comb(states + often, states) < length:
        often += 1
    return often * length - comb(states + often, states + 1)


@pytest.mark.parametrize(("length", "states", "again"), REVOLVE)
def test_revolve_in_closed_form(length: int, states: int, again: int) -> None:
    assert extra_forwards(length, states) == again


@pytest.mark.parametrize(("length", "states", "again"), REVOLVE)
def test_the_optimum_of_equal_steps_is_revolves(length: int, states: int, again: int) -> None:
    chain = steps(length)
    budget = states + 3  # the state a step starts from, the one it makes, and the gradient
    grid = BudgetGrid(chain, budget, "up", budget)

    assert grid.least_recompute_flops(budget) == again
    evaluation = evaluate(chain, grid.items(budget))
    assert (evaluation.recompute_flops, evaluation.peak_bytes) == (again, budget)


@given(st.integers(2, 12), st.integers(1, 5))
def test_the_exact_front_of_equal_steps_is_revolves(length: int, states: int) -> None:
    best = ParetoFronts(steps(length), budget=states + 3).chain_front[-1]

    assert best.recompute_flops == extra_forwards(length, min(states, length))


@pytest.mark.parametrize(("layers", "inside", "boundary", "k", "peak"), [(96, 32, 2, 2, 164), (100, 96, 4, 2, 400)])
def test_the_best_k_of_equal_layers(layers: int, inside: int, boundary: int, k: int, peak: int) -> None:
    """k = sqrt(l·B/A): sqrt(96·2/34) = 2.4 and sqrt(100·4/100) = 2, with 2·sqrt(l·A·B) = 162 and 400 bytes."""
    chain = uniform(layers, inside, boundary)
    found = best_k(chain)

    assert evaluate(chain, found).peak_bytes == evaluate(chain, every_k(chain, k)).peak_bytes == peak
    assert peak >= isqrt(4 * layers * (inside + boundary) * boundary)


def test_korthikantis_layer_at_every_k() -> None:
    """34 of 2 units a layer, 96 layers: 3264 kept, 226 recomputed separately, 164 in pairs."""
    chain = uniform(96, 32, 2)

    assert evaluate(chain, save_everything(chain)).saved_bytes == 96 * 34 + 2
    assert evaluate(chain, every_layer(chain)).peak_bytes == 96 * 2 + 34
    assert evaluate(chain, every_k(chain, 2)).peak_bytes == 48 * 2 + 2 * 34


def test_the_square_root_rule() -> None:
    assert square_root(uniform(96, 32, 2)).strategy == "sqrt(l) = 10"


@settings(deadline=None)
@given(st.integers(2, 9), st.integers(0, 60), st.integers(1, 9))
def test_the_optimum_beats_every_rule_of_thumb(layers: int, inside: int, boundary: int) -> None:
    chain = uniform(layers, inside, boundary)
    for plan in (save_everything(chain), every_layer(chain), square_root(chain), best_k(chain)):
        rule = evaluate(chain, plan)
        found = optimal(chain, rule.peak_bytes)
        assert found is not None
        assert found.evaluation.recompute_flops <= rule.recompute_flops


def test_plans_of_the_front_are_plain_data() -> None:
    items = items_of(ParetoFronts(uniform(3, 32, 2)).chain_front[0])

    assert all(isinstance(item, int | tuple) for item in items)
