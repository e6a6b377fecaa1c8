"""JSON of a change that saves memory, the same in every document."""

from __future__ import annotations

from typing import Any

from memcalc.changes.finding import Change


def change_document(change: Change) -> dict[str, Any]:
    """Return the fields of a change, its `--set` words, and its cost."""
    return {
        "levers": list(change.levers),
        "set": list(change.overrides),
        "cost": change.cost,
        "result": change.result,
    }
