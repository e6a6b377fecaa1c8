"""Segments of k blocks, each recomputed as a whole, and the k with the lowest peak.

Source: Chen et al., Training deep nets with sublinear memory cost (arXiv 1604.06174).
"""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.recomputation.chain import Chain
from memcalc.recomputation.evaluation import evaluate
from memcalc.recomputation.plan import Plan, Segment, segmented


def every_k(chain: Chain, k: int) -> Plan:
    """Return the plan of segments of k blocks; fewer if a segment would cross a border."""
    return Plan(cut(chain, k), f"every {k}")


def cut(chain: Chain, k: int) -> Segment:
    """Return the items of `every_k`."""
    return segmented(len(chain), _spans(chain, k))


def _spans(chain: Chain, k: int) -> Iterator[tuple[int, int]]:
    position = 0
    while position < len(chain):
        stop = min(position + k, chain.reach[position])
        if stop > position:
            yield position, stop
        position = max(stop, position + 1)


def best_k(chain: Chain) -> Plan:
    """Return the plan for the k with the lowest peak, trying all, as blocks may differ; the smallest of equals."""
    longest = max((stop - start for start, stop in enumerate(chain.reach)), default=1)
    plans = [every_k(chain, k) for k in range(1, max(longest, 1) + 1)]
    best = min(plans, key=lambda plan: evaluate(chain, plan).peak_bytes)
    return Plan(best.items, best.strategy)
