"""A word where a rule of thumb decides: close to the card's memory, the requests can be played instead."""

from __future__ import annotations

from dataclasses import replace

from memcalc.ledger.result import Result

# Of what is usable: recorded runs reserve 1.075 times what they allocate in the median (docs/accuracy.md).
NEAR_PERCENT = 10

HINT = "Close to the card's memory: --rehearse plays every request to PyTorch's allocator, for what is really reserved."


def with_hint(result: Result) -> Result:
    """The estimate, with a note where it is close to the card and a rehearsal would say more."""
    headroom = result.headroom_bytes
    if result.card is None or headroom is None or result.confidence != "formula" or result.generation is not None:
        return result
    if abs(headroom) * 100 > result.card.usable_bytes * NEAR_PERCENT:
        return result
    from memcalc.rehearsal.rehearsal import why_not

    return result if why_not(result.spec) else replace(result, notes=(*result.notes, HINT))
