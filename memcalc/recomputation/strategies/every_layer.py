"""Recompute every block separately, the default of gradient checkpointing in frameworks."""

from __future__ import annotations

from memcalc.recomputation.chain import Chain
from memcalc.recomputation.plan import Plan
from memcalc.recomputation.strategies.every_k import cut


def every_layer(chain: Chain) -> Plan:
    """Return the plan that recomputes each recomputable block separately."""
    return Plan(cut(chain, 1), "every layer")
