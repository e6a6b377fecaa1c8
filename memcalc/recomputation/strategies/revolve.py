"""Revolve (Griewank and Walther, ACM Trans. Math. Softw. 26(1), 2000): chains of equal steps, at most c saved states.

The closed forms for this case validate the optimum for general chains.
"""

from __future__ import annotations

from math import comb


def repetitions(length: int, checkpoints: int) -> int:
    """The least r with C(c + r, c) >= l: how often the most repeated step is recomputed."""
    often = 0
    while comb(checkpoints + often, checkpoints) < length:
        often += 1
    return often


def extra_forwards(length: int, checkpoints: int) -> int:
    """r·l - C(c + r, c + 1): minimum forward steps to recompute, with c states in memory, the first one included."""
    often = repetitions(length, checkpoints)
    return often * length - comb(checkpoints + often, checkpoints + 1)
