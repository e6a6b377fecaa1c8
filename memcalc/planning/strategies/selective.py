"""Which results recomputed layers keep, and how many layers are recomputed: a knapsack of bytes against FLOPs.

An integer programme, solved by HiGHS through SciPy. Of L layers that are alike n are recomputed; k(o) says whether
these keep the result of operator o, and w(o) = n·k(o) how many do. Minimise n·F - sum w(o)·f(o), F being the FLOPs of
a layer that keeps its input alone, subject to (L - n)·A + sum w(o)·s(o) <= room, A being what a kept layer holds
beyond it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memcalc.errors import Unavailable
from memcalc.extras import installation

TIE = 1e-6  # of a layer's FLOPs: what a plan may cost more if it needs no memory at all rather than all of the room


class Product(NamedTuple):
    """An operator of a layer: bytes of its result beyond what is kept already, and FLOPs that keeping it spares."""

    name: str
    kept_bytes: int
    spared_flops: int


class Choice(NamedTuple):
    """How many layers are recomputed, and the operators whose results these keep."""

    recomputed: int
    keep: tuple[str, ...]


def choose(
    layers: int, inside_bytes: int, again_flops: int, products: Sequence[Product], room_bytes: int
) -> Choice | None:
    """The choice with the fewest FLOPs that run again; None: the room is below nothing.

    Args:
        layers: L, all alike.
        inside_bytes: A, of a layer that is not recomputed, its input left out.
        again_flops: F, of a layer that keeps its input alone.
        products: what may be kept.
        room_bytes: for all layers, their inputs left out.

    Raises:
        Unavailable: SciPy is missing.
    """
    if room_bytes < 0:
        return None
    if layers * inside_bytes <= room_bytes:
        return Choice(0, ())
    try:
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ImportError as error:
        raise Unavailable(f"selective plans are solved by SciPy's HiGHS: {installation('plan')}") from error
    count = len(products)
    unit = max(room_bytes, 1)
    sizes = np.array([product.kept_bytes / unit for product in products])
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
    keep = tuple(product.name for product, kept in zip(products, chosen[1 : count + 1], strict=True) if kept)
    return Choice(int(chosen[0]), keep)
