"""The published chains, with the arithmetic."""

from collections.abc import Callable

import pytest

from memcalc.recomputation.chain import Chain
from memcalc.recomputation.evaluation import evaluate, evaluate_without_recomputation
from memcalc.recomputation.strategies.optimal import optimal
from memcalc.spec.hardware.gpus import find_gpu
from tests.recomputation.published import BRANCHES, LAYERS, PARAMETERS, branches, eight_products, keeping


@pytest.mark.parametrize(
    ("items", "peak", "again"),
    [
        # Everything kept: x0 to x7, x8 for the loss; then the gradient of x8.
        ((0, 1, 2, 3, 4, 5, 6, 7, 8), 9 + 1, 0),
        # x2 and x5 kept. While 6 to 8 run again: x0, x2, x5; x6, x7; gradients of x8 and x7.
        (((0, 1), (2, 3, 4), (5, 6, 7), 8), 3 + 2 + 2, 8),
        # x3 and x6 kept. While 7 and 8 run again: x0, x3, x6; x7; two gradients. 4 to 6: x0, x3; x4, x5; two gradients.
        (((0, 1, 2), (3, 4, 5), (6, 7), 8), 3 + 1 + 2, 8),
    ],
)
def test_eight_products(items: tuple[int | tuple[int, ...], ...], peak: int, again: int) -> None:
    found = evaluate(eight_products(), items)

    assert (found.peak_bytes, found.recompute_flops) == (peak, again)


def test_eight_products_at_their_best() -> None:
    """Six bytes take six products again, not eight: the last two need not run twice."""
    found = optimal(eight_products(), 6)

    assert found is not None
    assert found.plan.items == ((0, 1, 2), (3, 4, 5), 6, 7, 8)
    assert (found.evaluation.peak_bytes, found.evaluation.recompute_flops, found.loss) == (6, 6, 0)


def test_the_branches_are_as_described() -> None:
    chain = branches(1000)

    assert PARAMETERS == 64 * (21 * 512 * 512 + 512 * 8) == 352_583_680
    assert len(chain) == 64 * 22 + 2
    # Everything kept: weights and moments; the input and 21 of [1000, 512] a branch; 64 of [1000, 8] joined.
    kept = 12 * PARAMETERS + 4 * 1000 * (512 + 64 * 21 * 512 + 64 * 8)
    assert kept < evaluate_without_recomputation(chain).peak_bytes < kept + 4 * PARAMETERS


def largest(need: Callable[[Chain], int], room: int) -> int:
    """The largest batch that fits."""
    low, high = 1, 2**17
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if need(branches(middle)) <= room else (low, middle)
    return low


@pytest.mark.long
def test_the_branches_on_a_p40() -> None:
    """Layers 5, 10, 15 and 19 kept against everything kept, and the plan that the optimum finds."""
    card = find_gpu("p40")
    room = (card.usable_bytes - card.context_bytes) * 1000 // 1093  # of what is reserved, as everywhere
    kept, plan = keeping(5, 10, 15, 19), keeping(5, 10, 15, 19)

    assert largest(lambda chain: evaluate_without_recomputation(chain).peak_bytes, room) == 6171
    assert largest(lambda chain: evaluate(chain, kept).peak_bytes, room) == 31737
    chain = branches(31737)
    published = evaluate(chain, plan)
    better = optimal(chain, published.peak_bytes)
    assert better is not None
    assert better.evaluation.peak_bytes <= published.peak_bytes
    assert better.evaluation.recompute_flops < published.recompute_flops
    assert published.recompute_flops == chain.flops  # every product of every branch runs twice
    assert len(chain) - 2 == BRANCHES * LAYERS
