"""The composition of a recorded run's memory: by component, by source line, leaks, and unusable memory."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from memcalc.ledger.component import Component
from memcalc.snapshots.frames import component, is_backward, place
from memcalc.snapshots.initial_state import InitialState
from memcalc.snapshots.recording import DeviceRecording, Snapshot

LONG_LIVED = 2  # steps after which a live tensor counts as leaked


class SourceLine(NamedTuple):
    """The tensors of one source line. Requested bytes."""

    location: str  # file, line and function
    component: Component | None  # None if unknown
    bytes: int  # of all tensors
    tensors: int  # their number
    largest: int  # bytes of the largest tensor


class Leak(NamedTuple):
    """Tensors that one source line allocated in several steps and that are live at the end."""

    location: str  # file, line and function
    steps: int  # number of steps that allocated them
    tensors: int  # their number
    bytes: int  # requested, of all tensors


@dataclass(frozen=True)
class Composition:
    """Live memory at the peak and at the end. Requested bytes, unless stated otherwise."""

    peak_bytes: int
    by_component: dict[Component | None, int]  # at the peak; None if the stack does not show the component
    lines: tuple[SourceLine, ...]  # at the peak, the largest first
    leaks: tuple[Leak, ...]
    steps: int  # in the recording; leaks are detected from three steps on
    allocated_bytes: int  # at the end, in blocks
    reserved_bytes: int
    inactive_split_bytes: int
    rounding_bytes: int  # allocated minus requested bytes of blocks in use


class Attribution(NamedTuple):
    """The component and the step of each entry."""

    kinds: list[Component | None]  # of allocations
    steps: list[int]  # number of optimizer steps begun; empty if unknown


def attribute(snapshot: Snapshot, recording: DeviceRecording) -> Attribution:
    """Return the components and steps of a history, for `compose` and for its events."""
    steps = _steps(snapshot, recording)
    return Attribution(_kinds(snapshot, recording, steps), steps)


def compose(
    snapshot: Snapshot, recording: DeviceRecording, start: InitialState, known: Attribution | None = None
) -> Composition:
    """Return the composition of a recording.

    Args:
        snapshot: the file.
        recording: one device of it.
        start: its initial state.
        known: the result of `attribute`, if already computed.
    """
    kinds, steps = known or attribute(snapshot, recording)
    live: dict[int, tuple[int, int, int]] = {
        held.address: (held.requested, held.stack, -1) for held in start.blocks_in_use.values()
    }  # address -> bytes, stack, position of the alloc
    total = highest = sum(size for size, _, _ in live.values())
    peak = -1
    for index, (action, address, size, _, _, stack, _) in enumerate(recording.entries):
        if action == "alloc":
            live[address] = (size, stack, index)
            total += size
            if total > highest:
                highest, peak = total, index
        elif action == "free_requested":
            total -= live.pop(address, (0, 0, 0))[0]
    at_peak = _live(recording, start, peak)
    return Composition(
        peak_bytes=highest,
        by_component=_by_component(at_peak, kinds, snapshot),
        lines=_lines(at_peak, kinds, snapshot),
        leaks=_leaks(live, steps, snapshot),
        steps=steps[-1] if steps else 0,
        allocated_bytes=sum(segment.allocated_size for segment in recording.segments),
        reserved_bytes=sum(segment.total_size for segment in recording.segments),
        inactive_split_bytes=sum(
            block.size
            for segment in recording.segments
            if not segment.is_expandable and len(segment.blocks) > 1
            for block in segment.blocks
            if block.state == "inactive"
        ),
        rounding_bytes=sum(
            block.size - block.requested_size
            for segment in recording.segments
            for block in segment.blocks
            if block.state != "inactive"
        ),
    )


def _kinds(snapshot: Snapshot, recording: DeviceRecording, steps: list[int]) -> list[Component | None]:
    """Return the component of each entry that is an allocation.

    Allocations of backward are gradients if they stay live until the optimizer steps, else temporaries. An allocation
    without a stack, among others with stacks, was made by backward's own threads.
    """
    told = [component(stack) for stack in snapshot.stacks]
    backward = [is_backward(stack) for stack in snapshot.stacks]
    backward[0] = len(snapshot.stacks) > 1 and any(frame for stack in snapshot.stacks for frame in stack)
    found: list[Component | None] = [None] * len(recording.entries)
    live: dict[int, int] = {}
    for index, (action, address, _, _, _, stack, _) in enumerate(recording.entries):
        if action == "alloc":
            live[address] = index
            found[index] = told[stack]
        elif action == "free_requested":
            born = live.pop(address, -1)
            if born >= 0 and found[born] is None and backward[recording.entries[born].stack]:
                lived = steps[index] > steps[born] if steps else False
                found[born] = Component.GRADIENTS if lived else Component.TEMPORARIES
    for born in live.values():
        if found[born] is None and backward[recording.entries[born].stack]:
            found[born] = Component.GRADIENTS
    return found


def _steps(snapshot: Snapshot, recording: DeviceRecording) -> list[int]:
    """Return the number of optimizer steps begun at each entry; empty if unknown.

    Steps are recognized by PyTorch's annotations, else by the stacks of the optimizer's allocations.
    """
    starts = [a.time_us for a in recording.annotations if a.name.startswith("Optimizer.step") and a.stage == "START"]
    found, count = [], 0
    if starts:
        for entry in recording.entries:
            while count < len(starts) and starts[count] <= entry.time_us:
                count += 1
            found.append(count)
        return found
    optimizer = [
        any(frame.name == "step" and "optim" in frame.filename for frame in stack) for stack in snapshot.stacks
    ]
    inside = False
    for action, _, _, _, _, stack, _ in recording.entries if any(optimizer) else ():
        if action == "alloc":
            count += optimizer[stack] and not inside
            inside = optimizer[stack]
        found.append(count)
    return found if count else []


def _live(recording: DeviceRecording, start: InitialState, until: int) -> list[tuple[int, int, int]]:
    """Return bytes, stack and position of the allocations that are live after an entry."""
    live = {held.address: (held.requested, held.stack, -1) for held in start.blocks_in_use.values()}
    for index, entry in enumerate(recording.entries[: until + 1]):
        if entry.action == "alloc":
            live[entry.address] = (entry.size, entry.stack, index)
        elif entry.action == "free_requested":
            live.pop(entry.address, None)
    return list(live.values())


def _kind(position: int, stack: int, kinds: list[Component | None], snapshot: Snapshot) -> Component | None:
    return kinds[position] if position >= 0 else component(snapshot.stacks[stack])


def _by_component(
    live: list[tuple[int, int, int]], kinds: list[Component | None], snapshot: Snapshot
) -> dict[Component | None, int]:
    sums: Counter[Component | None] = Counter()
    for size, stack, position in live:
        sums[_kind(position, stack, kinds, snapshot)] += size
    return {kind: sums[kind] for kind in (*Component, None) if sums[kind]}


def _lines(
    live: list[tuple[int, int, int]], kinds: list[Component | None], snapshot: Snapshot
) -> tuple[SourceLine, ...]:
    groups: dict[tuple[str, Component | None], list[int]] = defaultdict(list)
    for size, stack, position in live:
        groups[place(snapshot.stacks[stack]), _kind(position, stack, kinds, snapshot)].append(size)
    lines = [SourceLine(where, kind, sum(sizes), len(sizes), max(sizes)) for (where, kind), sizes in groups.items()]
    return tuple(sorted(lines, key=lambda line: (-line.bytes, line.location)))


def _leaks(live: dict[int, tuple[int, int, int]], steps: list[int], snapshot: Snapshot) -> tuple[Leak, ...]:
    """Return source lines with live tensors from two or more steps at the end, each at least one step old.

    The first step is ignored, because it allocates the persistent optimizer state.
    """
    if not steps or steps[-1] <= LONG_LIVED:
        return ()
    groups: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for size, stack, position in live.values():
        if position >= 0 and 1 <= steps[position] < steps[-1]:
            groups[place(snapshot.stacks[stack])].append((steps[position], size))
    leaks = [
        Leak(where, len({step for step, _ in born}), len(born), sum(size for _, size in born))
        for where, born in groups.items()
    ]
    return tuple(sorted((leak for leak in leaks if leak.steps >= LONG_LIVED), key=lambda leak: -leak.bytes))
