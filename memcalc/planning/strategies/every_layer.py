"""Recompute every block by itself, as frameworks do where gradient checkpointing is switched on."""

from __future__ import annotations

from memcalc.planning.chain import Chain
from memcalc.planning.plan import Plan
from memcalc.planning.strategies.every_k import cut


def every_layer(chain: Chain) -> Plan:
    """Each block that may run twice does."""
    return Plan(cut(chain, 1), "every layer")
