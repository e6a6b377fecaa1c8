"""A change that saves memory, as JSON: what is alike wherever one is offered."""

from __future__ import annotations

from typing import Any

from memcalc.changes.finding import Change


def change_document(change: Change) -> dict[str, Any]:
    """What is turned, how --set takes it, and what it costs."""
    return {
        "levers": list(change.levers),
        "set": list(change.overrides),
        "cost": change.cost,
        "result": change.result,
    }
