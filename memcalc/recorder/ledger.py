"""A recorded run as a ledger: live tensors at the peak of each phase, row by row."""

from __future__ import annotations

from collections.abc import Sequence

from memcalc.events.event import PINNED, Event, EventType
from memcalc.events.memory_curve import BASELINE, phase_log
from memcalc.events.timeline import AllocationGroup, Timeline, groups
from memcalc.events.timeline import timeline as added_up
from memcalc.ledger.component import Component
from memcalc.ledger.ledger import Ledger, Rows
from memcalc.ledger.row import Row
from memcalc.workspaces.pinned import pinned_block

CITATION = "traced"
ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int64": 8, "int32": 4, "float64": 8, "bool": 1, "uint8": 1, "int8": 1}


def traced_ledger(timeline: Timeline, allocated: Sequence[int] | None = None) -> Ledger:
    """Return the ledger of a run. Each phase sums to its peak of allocated bytes.

    Args:
        timeline: the events.
        allocated: bytes allocated by an allocator after each event; their excess over requested bytes is block
            rounding. None: there is no allocator, and bytes are requested bytes.
    """
    moments = peak_events(timeline, allocated)
    living = live_at(timeline.events, sorted(set(moments.values())))
    phases_of: dict[tuple[AllocationGroup, int], list[str]] = {}
    for phase, event in moments.items():
        for number, group in enumerate(_groups(living[event], timeline, allocated, event)):
            phases_of.setdefault((group, number), []).append(phase)
    merged: dict[AllocationGroup, list[str]] = {}
    for (group, _), phases in phases_of.items():
        merged.setdefault(group, []).extend(phases)
    return Ledger([Rows(_row(group, phases) for group, phases in merged.items())], tuple(moments))


def host_ledger(events: Sequence[Event]) -> Ledger | None:
    """Return the ledger of host memory; None if the run puts nothing there."""
    if not events:
        return None
    handed_out: list[int] = []
    blocks: dict[int, int] = {}
    total = 0
    for event in events:
        if event.kind is EventType.ALLOC:
            blocks[event.storage] = pinned_block(event.bytes) if event.stream == PINNED else event.bytes
            total += blocks[event.storage]
        elif event.kind is EventType.FREE:
            total -= blocks.pop(event.storage)
        handed_out.append(total)
    return traced_ledger(added_up(events), handed_out)


def peak_events(timeline: Timeline, allocated: Sequence[int] | None = None) -> dict[str, int]:
    """Return the index of the event at each phase's peak; for a phase that runs several times, of the highest one."""
    found: dict[str, tuple[int, int]] = {}
    for line in phase_log(timeline, allocated):
        if line.phase != BASELINE and (line.phase not in found or line.peak > found[line.phase][0]):
            found[line.phase] = (line.peak, line.event)
    return {phase: event for phase, (_, event) in found.items()}


def live_at(events: Sequence[Event], moments: Sequence[int]) -> dict[int, list[Event]]:
    """Return the live allocations after each of some events, given in ascending order."""
    living: dict[int, Event] = {}
    found: dict[int, list[Event]] = {}
    begin = 0
    for moment in moments:
        for event in events[begin : moment + 1]:
            if event.kind is EventType.ALLOC:
                living[event.storage] = event
            elif event.kind is EventType.FREE:
                del living[event.storage]
        begin = moment + 1
        found[moment] = list(living.values())
    return found


def _groups(
    living: list[Event], timeline: Timeline, allocated: Sequence[int] | None, event: int
) -> list[AllocationGroup]:
    found = groups(living)
    added = 0 if allocated is None else allocated[event] - timeline.totals[event]
    if added:
        found.append(
            AllocationGroup(
                Component.BLOCK_ROUNDING,
                "allocator",
                "rounding and unsplit remainders",
                (added,),
                "uint8",
                "",
                1,
                added,
            )
        )
    return found


def _row(group: AllocationGroup, phases: list[str]) -> Row:
    return Row(
        group.component or Component.TEMPORARIES,
        group.module or "step",
        group.operator,
        group.shape,
        group.dtype,
        group.count,
        group.bytes,
        tuple(phases),
        formula(group),
        group.line or CITATION,
    )


def formula(group: AllocationGroup) -> str:
    """Return the bytes of one tensor as a product; as a number if its storage is larger than the tensor."""
    each = group.bytes // group.count
    product = ITEM_BYTES.get(group.dtype, 0)
    for extent in group.shape:
        product *= extent
    if product != each or not group.shape:
        return str(each)
    return "·".join(map(str, (ITEM_BYTES[group.dtype], *group.shape)))
