"""Write ledger rows from items."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from memcalc.ledger.component import Component
from memcalc.ledger.row import Row
from memcalc.ledger.row_drafts import PHASES, RowDraft, phases_of

ROUNDING_SOURCE = "torch 2.13 c10/cuda/CUDACachingAllocator.cpp: round_size, should_split"


def write_rows(
    items: Iterable[RowDraft],
    what: str,
    tails: Mapping[int, int] = MappingProxyType({}),
    phases: tuple[str, ...] = PHASES,
) -> list[Row]:
    """Return one row for all identical tensors that are live together, then the rows of the allocator's rounding.

    Args:
        items: tensors with their phases.
        what: names these items in the row of the allocator's rounding.
        tails: bytes of unsplit remainders, by phase mask.
        phases: the phases of the mask bits.
    """
    together: dict[tuple[object, ...], tuple[RowDraft, int]] = {}
    rounding = dict(tails)
    for item in items:
        if not item.count or not item.each or not item.mask:  # of nothing, or live in no phase
            continue
        key = (item.mask, item.module, item.tensor, item.each, item.component)
        known = together.get(key)
        together[key] = (item, item.count) if known is None else (item, known[1] + item.count)
        if item.block != item.each:
            rounding[item.mask] = rounding.get(item.mask, 0) + item.count * (item.block - item.each)
    merged: dict[tuple[object, ...], tuple[RowDraft, int, int]] = {}
    for item, count in together.values():
        alike: tuple[object, ...] = (item.module, item.tensor, item.each, item.component, count)
        while alike in merged and merged[alike][2] & item.mask:  # another tensor with the same name
            alike = (*alike, "another")
        mask = merged[alike][2] if alike in merged else 0
        merged[alike] = (item, count, mask | item.mask)
    rows = [item.row(count, mask, phases) for item, count, mask in merged.values()]
    return rows + _rounding_rows(rounding, what, phases)


def _rounding_rows(rounding: Mapping[int, int], what: str, phases: tuple[str, ...]) -> list[Row]:
    amounts = [sum([amount for mask, amount in rounding.items() if mask >> bit & 1]) for bit in range(len(phases))]
    masks: dict[int, int] = {}
    for bit, amount in enumerate(amounts):
        if amount:
            masks[amount] = masks.get(amount, 0) | 1 << bit
    return [
        Row(
            Component.BLOCK_ROUNDING,
            "allocator",
            f"rounding of {what}",
            (amount,),
            "uint8",
            1,
            amount,
            phases_of(mask, phases),
            "requests rounded up to 512 bytes; remainders of up to 1 MiB are not split off",
            ROUNDING_SOURCE,
        )
        for amount, mask in masks.items()
    ]
