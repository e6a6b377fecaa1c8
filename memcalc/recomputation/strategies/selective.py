"""Selective checkpointing as a knapsack of bytes against FLOPs: which results to save, in how many layers.

An integer program, solved by HiGHS through SciPy. Of L identical layers n are recomputed; k(o) is 1 if these save the
result of operator o, and w(o) = n·k(o) is the number of layers that do. Minimize n·F - sum w(o)·f(o) subject to
(L - n)·A + sum w(o)·s(o) <= room. F is the FLOPs of a layer that saves only its input, and f(o) the FLOPs that saving
o avoids. A is the memory of a layer without recomputation beyond its input, and s(o) the bytes of o's result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memcalc.errors import Unavailable
from memcalc.extras import installation

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
