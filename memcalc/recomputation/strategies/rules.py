"""Rules of thumb: nothing, every block, or segments of k blocks, each recomputed as a whole.

Source: Chen et al., Training deep nets with sublinear memory cost (arXiv 1604.06174).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt

from memcalc.recomputation.chain import Chain
from memcalc.recomputation.evaluation import evaluate
from memcalc.recomputation.plan import Plan, Segment, all_saved, segmented


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
    return min(plans, key=lambda plan: evaluate(chain, plan).peak_bytes)


def every_layer(chain: Chain) -> Plan:
    """Return the plan that recomputes each block separately, the default of gradient checkpointing in frameworks."""
    return Plan(cut(chain, 1), "every layer")


def square_root(chain: Chain) -> Plan:
    """Return segments of sqrt(l) blocks, where l counts recomputable blocks; the root is rounded up.

    The rule of thumb of Chen et al. (arXiv 1604.06174), independent of bytes.
    """
    recomputable = sum(stop > start for start, stop in enumerate(chain.reach))
    k = isqrt(max(recomputable - 1, 0)) + 1
    return Plan(cut(chain, k), f"sqrt(l) = {k}")


def save_everything(chain: Chain) -> Plan:
    """Return the plan without recomputation: the fastest, and the largest."""
    return Plan(all_saved(len(chain)), "none")
