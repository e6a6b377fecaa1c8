"""From items to the rows of a ledger."""

from __future__ import annotations

from memcalc.estimation.items import PHASES, Item, phases_of
from memcalc.ledger.component import Component
from memcalc.ledger.row import Row

ROUNDING_SOURCE = "torch 2.13 c10/cuda/CUDACachingAllocator.cpp: round_size, should_split"


def write_rows(items: list[Item], tails: dict[int, int]) -> list[Row]:
    """One row for all tensors that are alike and alive together, then what the allocator adds to them.

    Args:
        items: everything that is alive at some time.
        tails: bytes by phase mask of blocks' rests that are not split off.
    """
    together: dict[tuple[object, ...], tuple[Item, int]] = {}
    rounding = list(tails.items())
    for item in items:
        if not item.count or not item.each:
            continue
        key = (item.mask, item.module, item.tensor, item.each, item.component)
        known = together.get(key)
        together[key] = (item, item.count) if known is None else (item, known[1] + item.count)
        if item.block != item.each:
            rounding.append((item.mask, item.count * (item.block - item.each)))
    merged: dict[tuple[object, ...], tuple[Item, int, int]] = {}
    for item, count in together.values():
        key = (item.module, item.tensor, item.each, item.component, count)
        mask = merged[key][2] if key in merged else 0
        merged[key] = (item, count, mask | item.mask)
    return [*(item.row(count, mask) for item, count, mask in merged.values()), *_rounding_rows(rounding)]


def _rounding_rows(rounding: list[tuple[int, int]]) -> list[Row]:
    amounts = [sum(amount for mask, amount in rounding if mask >> bit & 1) for bit in range(len(PHASES))]
    masks: dict[int, int] = {}
    for bit, amount in enumerate(amounts):
        if amount:
            masks[amount] = masks.get(amount, 0) | 1 << bit
    return [
        Row(
            Component.BLOCK_ROUNDING,
            "allocator",
            "rounding of requests",
            (amount,),
            "uint8",
            1,
            amount,
            phases_of(mask),
            "requests rounded up to 512 bytes; rests of up to 1 MiB that are not split off",
            ROUNDING_SOURCE,
        )
        for amount, mask in masks.items()
    ]
