"""Replay of one source of events through one allocator, or several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Unpack

from memcalc.allocator.paddle.collection import transformed
from memcalc.allocator.playing import run, state_after
from memcalc.allocator.policies import Device, Made, make, policy_of
from memcalc.allocator.result import ReplayResult
from memcalc.errors import InputError
from memcalc.events.course import Course
from memcalc.events.event import Event
from memcalc.events.timeline import timeline
from memcalc.replaying.options import Question
from memcalc.replaying.result import Replay, Trial, best
from memcalc.replaying.sources import Source
from memcalc.replaying.trials import COMPARED, swept
from memcalc.snapshots.composition import compose
from memcalc.snapshots.verification import can_verify, verify
from memcalc.spec.cards import Card


def replaying(source: Source, card: Card | None = None, **options: Unpack[Question]) -> Replay:
    """Replay a source through one allocator, then through all others to be compared.

    Args:
        source: the events.
        card: the GPU; None for a device that never runs out of memory.
        options: see `Question`.

    Raises:
        InputError: for invalid settings.
    """
    config, release, memory_fraction = (
        options.get("alloc_conf", ""),
        options.get("release"),
        options.get("memory_fraction"),
    )
    policy = policy_of(options.get("allocator", "pytorch"), config, release)
    sweeps, compare = options.get("sweep", ()), options.get("compare", False)
    device = device_of(card)

    def made(name: str, settings: str) -> Made:
        ours = name == policy
        return make(name, settings, release if ours else None, device, memory_fraction if ours else None)

    wanted = [(policy, settings) for settings in swept(policy, config, sweeps)] if sweeps else []
    rivals = [(name, settings, True) for name, settings in wanted]
    rivals += [(name, settings, False) for name, settings in COMPARED] if compare else []
    asked = made(policy, config)
    for name, settings, strict in rivals:  # invalid settings are rejected before any long replay
        if strict:
            made(name, settings)
    result, course, events = _followed(source.events, asked)
    trials = [Trial(policy, config, result)]
    for name, settings, strict in rivals:
        if (name, settings) not in {(trial.policy, trial.config) for trial in trials}:
            trials.append(_trial(source.events, name, settings, made, strict=strict))
    shown = result.failure.event - 1 if result.failure else result.widest.event
    segments, owners = state_after(events, made(policy, config).allocator, shown)
    recorded = source.recorded
    told = config if policy == "pytorch" else ""
    return Replay(
        source=source,
        card=card,
        trials=tuple(trials),
        recommendation=best(trials),
        course=course,
        shown_event=shown,
        segments=segments,
        owners=owners,
        verification=verify(recorded.snapshot, recorded.recording, recorded.start, told)
        if recorded and can_verify(recorded.recording, recorded.start)
        else None,
        composition=compose(*recorded) if recorded else None,
    )


def device_of(card: Card | None) -> Device:
    """Return the device model of a GPU: its usable memory, minus its context and kernels."""
    if card is None:
        return Device()
    major = card.compute_capability[0] if card.compute_capability else None
    return Device(capacity=card.usable_bytes, used=card.context_bytes, capability_major=major)


def _trial(
    events: Sequence[Event], policy: str, config: str, made: Callable[[str, str], Made], *, strict: bool
) -> Trial:
    """Replay another allocator. Unless `strict`, one that cannot run (for example without a GPU) is skipped."""
    try:
        found = made(policy, config)
    except InputError as error:
        if strict:
            raise
        return Trial(policy, config, None, str(error))
    return Trial(policy, config, run(_for(events, found), found.allocator, found.notes))


def _for(events: Sequence[Event], made: Made) -> Sequence[Event]:
    """Return the events that reach the allocator."""
    return events if made.paddle is None else transformed(events, made.paddle)


def _followed(events: Sequence[Event], made: Made) -> tuple[ReplayResult, Course, Sequence[Event]]:
    """Replay the events; return the result, and the curve of allocated and reserved memory."""
    allocated: list[int] = []
    reserved: list[int] = []
    counters = made.allocator.counters

    small, large, held = counters.small, counters.large, counters.reserved

    def note() -> None:  # once per event: inlined instead of calling the counters' properties
        allocated.append(small.allocated_now + large.allocated_now)
        reserved.append(held.current)

    events = _for(events, made)
    result = run(events, made.allocator, made.notes, after_each=note)
    return result, Course(timeline(events), allocated, reserved), events
