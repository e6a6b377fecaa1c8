"""No recomputation."""

from __future__ import annotations

from memcalc.recomputation.chain import Chain
from memcalc.recomputation.plan import Plan, kept_all


def keep_everything(chain: Chain) -> Plan:
    """Return the plan without recomputation: the fastest, and the largest."""
    return Plan(kept_all(len(chain)), "none")
