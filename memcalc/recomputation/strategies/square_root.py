"""Segments of sqrt(l) blocks: the rule of thumb of Chen et al. (arXiv 1604.06174), independent of bytes."""

from __future__ import annotations

from math import isqrt

from memcalc.recomputation.chain import Chain
from memcalc.recomputation.plan import Plan
from memcalc.recomputation.strategies.every_k import cut


def square_root(chain: Chain) -> Plan:
    """Return segments of sqrt(l) blocks, where l counts recomputable blocks; the root is rounded up."""
    recomputable = sum(stop > start for start, stop in enumerate(chain.reach))
    k = isqrt(max(recomputable - 1, 0)) + 1
    return Plan(cut(chain, k), f"sqrt(l) = {k}")
