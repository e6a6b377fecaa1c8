"""Segments of k blocks, each recomputed as a whole, and the k that needs least.

Source: Chen et al., Training deep nets with sublinear memory cost (arXiv 1604.06174).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt

from memcalc.planning.chain import Chain
from memcalc.planning.evaluation import evaluate
from memcalc.planning.plan import Plan, Segment, segmented


def every_k(chain: Chain, k: int, *, last_kept: bool = False) -> Plan:
    """Segments of k blocks.

    Args:
        chain: what is planned.
        k: blocks in a segment; fewer where a segment would cross a border.
        last_kept: whether the last segment is kept, as by `torch.utils.checkpoint.checkpoint_sequential`: backward
            begins there, so that running it again would cost time and save little.
    """
    return Plan(cut(chain, k, last_kept=last_kept), f"every {k}")


def cut(chain: Chain, k: int, *, last_kept: bool = False) -> Segment:
    """The items of `every_k`."""
    spans = list(_spans(chain, k))
    return segmented(len(chain), iter(spans[:-1] if last_kept else spans))


def _spans(chain: Chain, k: int) -> Iterator[tuple[int, int]]:
    position = 0
    while position < len(chain):
        stop = min(position + k, chain.reach[position])
        if stop > position:
            yield position, stop
        position = max(stop, position + 1)


def uniform_optimum(blocks: int, inside_bytes: int, boundary_bytes: int) -> int:
    """sqrt(l·B/A), rounded to a whole number of at least 1: the k at which ceil(l/k)·B + k·A is least.

    Args:
        blocks: l, all alike.
        inside_bytes: A, of everything that one block keeps.
        boundary_bytes: B, of what lies between two.
    """
    square = blocks * boundary_bytes // max(inside_bytes, 1)
    low = max(isqrt(square), 1)
    return min((low, low + 1), key=lambda k: (-(-blocks // k) * boundary_bytes + k * inside_bytes, k))


def best_k(chain: Chain) -> Plan:
    """The k with the lowest peak, all of them tried: blocks need not be alike. Of equal ones the smallest."""
    longest = max((stop - start for start, stop in enumerate(chain.reach)), default=1)
    plans = [every_k(chain, k) for k in range(1, max(longest, 1) + 1)]
    best = min(plans, key=lambda plan: evaluate(chain, plan).peak_bytes)
    return Plan(best.items, best.strategy)
