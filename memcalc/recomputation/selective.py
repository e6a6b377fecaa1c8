"""Plans inside a layer (selective checkpointing): recomputed layers, and the operators with results that they save."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memcalc.errors import InputError, Unavailable
from memcalc.extras import installation
from memcalc.recomputation.config_chain import ConfigChain, chain_of
from memcalc.recomputation.evaluation import evaluate
from memcalc.recomputation.plan import Plan, segmented
from memcalc.recomputation.search import Proposal
from memcalc.recomputation.strategies.optimal import OptimalPlan
from memcalc.recomputation.strategies.rules import every_layer
from memcalc.spec.matmuls import layer_matmuls, saves_matmuls
from memcalc.spec.spec import Spec

TRIES = 12  # corrections of the budget, each by the excess of a plan's allocated memory


class Selective:
    """Plans inside the layers of one run.

    The integer program counts memory at the end of forward. The memory of a layer's own backward is not linear, so each
    plan is evaluated, and its excess is subtracted from the next one's budget.

    Raises:
        InputError: the operators of the layers are not modelled separately.
    """

    def __init__(self, spec: Spec) -> None:
        if why := saves_matmuls(spec):
            raise InputError(
                f"strategy = selective saves results of single operators, but {why}.",
                "Use --strategy optimal.",
                "--strategy",
            )
        self._base = base = chain_of(spec, ())
        self._products = _products(base)
        every = evaluate(base.chain, every_layer(base.chain), record=True)
        # Memory of the LM head if only the inputs of layers are saved.
        self._head = max(moment.bytes for moment in every.points if moment.position == len(base.chain) - 1)

    def cheapest_plan(self, budget: int) -> Proposal | None:
        """Return the cheapest plan found within `budget` allocated bytes; None: there is none.

        Raises:
            Unavailable: SciPy is missing.
        """
        base, room = self._base, budget - self._head
        block = base.chain.blocks[base.first]
        for _ in range(TRIES):
            choice = choose(
                base.stop - base.first, block.inside_bytes, block.recompute_flops or 0, self._products, room
            )
            if choice is None:
                return None
            configured = chain_of(base.spec, choice.saved_operators)
            again = range(configured.first, configured.first + choice.recomputed)
            items = segmented(len(configured.chain), ((b, b + 1) for b in again))
            found = OptimalPlan(Plan(items, "selective"), evaluate(configured.chain, items), None)
            excess = found.evaluation.peak_bytes - budget
            if excess <= 0:
                return Proposal(configured, found, choice.saved_operators)
            room -= excess
        return None


def _products(base: ConfigChain) -> list[Product]:
    """Return the bytes and the FLOPs saved by keeping each operator's result."""
    names = layer_matmuls(base.spec.model, base.spec.training)
    bare = base.chain.blocks[base.first].recompute_flops or 0
    found = {name: chain_of(base.spec, (name,)).chain.blocks[base.first] for name in names}
    return [
        Product(name, block.released_late_bytes, bare - (block.recompute_flops or 0)) for name, block in found.items()
    ]


# Selective checkpointing as a knapsack of bytes against FLOPs: which results to save, in how many layers.
# An integer program, solved by HiGHS through SciPy. Of L identical layers n are recomputed; k(o) is 1 if these save
# the result of operator o, and w(o) = n·k(o) is the number of layers that do. Minimize n·F - sum w(o)·f(o) subject to
# (L - n)·A + sum w(o)·s(o) <= room. F is the FLOPs of a layer that saves only its input, and f(o) the FLOPs that
# saving o avoids. A is the memory of a layer without recomputation beyond its input, and s(o) the bytes of o's
# result.

TIE = 1e-6  # fraction of a layer's FLOPs: the extra cost allowed to a plan that needs no memory


class Product(NamedTuple):
    """An operator of a layer: additional bytes to save its result, and FLOPs that saving it avoids."""

    name: str
    saved_bytes: int
    spared_flops: int


class SelectiveChoice(NamedTuple):
    """The number of recomputed layers, and the operators with results that they save."""

    recomputed: int
    saved_operators: tuple[str, ...]


def choose(
    layers: int, inside_bytes: int, again_flops: int, products: Sequence[Product], room_bytes: int
) -> SelectiveChoice | None:
    """Return the choice with the fewest recomputed FLOPs; None if the room is negative.

    Args:
        layers: L, all identical.
        inside_bytes: A, of a layer that is not recomputed, without its input.
        again_flops: F, of a layer that saves only its input.
        products: the operators with results that may be saved.
        room_bytes: for all layers, without their inputs.

    Raises:
        Unavailable: SciPy is missing.
    """
    if room_bytes < 0:
        return None
    if layers * inside_bytes <= room_bytes:
        return SelectiveChoice(0, ())
    try:
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ImportError as error:
        raise Unavailable(
            f"strategy = selective needs SciPy, which is not installed. Run: {installation('plan')}"
        ) from error
    count = len(products)
    unit = max(room_bytes, 1)
    sizes = np.array([product.saved_bytes / unit for product in products])
    spared = np.array([product.spared_flops / max(again_flops, 1) for product in products])
    # Columns: n, then k of each operator, then w of each.
    zeros, one = np.zeros((count, count)), np.eye(count)
    ones = np.ones((count, 1))
    matrix = np.vstack(
        [
            np.hstack([[-inside_bytes / unit], np.zeros(count), sizes]),  # memory
            np.hstack([np.zeros((count, 1)), -layers * one, one]),  # w <= L·k
            np.hstack([-ones, zeros, one]),  # w <= n
            np.hstack([ones, layers * one, -one]),  # w >= n - L·(1 - k)
        ]
    )
    high = np.concatenate([[1 - layers * inside_bytes / unit], np.zeros(2 * count), np.full(count, layers)])
    tie = TIE * np.concatenate([[-inside_bytes / unit], np.zeros(count), sizes])
    found = milp(
        np.concatenate([[1.0], np.zeros(count), -spared]) + tie,
        integrality=np.concatenate([[1], np.ones(count), np.zeros(count)]),
        bounds=Bounds(
            np.concatenate([[0], np.zeros(2 * count)]),
            np.concatenate([[layers], np.ones(count), np.full(count, layers)]),
        ),
        constraints=LinearConstraint(matrix, -np.inf, high),
        options={"mip_rel_gap": 0.0},
    )
    if found.x is None:
        return None
    chosen = np.rint(found.x).astype(int)
    saved_operators = tuple(product.name for product, kept in zip(products, chosen[1 : count + 1], strict=True) if kept)
    return SelectiveChoice(int(chosen[0]), saved_operators)
