"""Replay of one source of events through one allocator, or several."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Unpack

from memcalc.allocator.event_replay import run, state_after
from memcalc.allocator.paddle.collection import transformed
from memcalc.allocator.registry import AllocatorDevice, NewAllocator, make, policy_of
from memcalc.allocator.result import ReplayResult
from memcalc.errors import InputError
from memcalc.events.event import Event
from memcalc.events.memory_curve import MemoryCurve
from memcalc.events.timeline import timeline
from memcalc.replaying.result import ReplayComparison, ReplayOptions, Trial, best
from memcalc.replaying.sources import EventSource
from memcalc.snapshots.composition import compose
from memcalc.snapshots.verification import can_verify, verify
from memcalc.spec.hardware.gpus import GpuSpec


def replay_source(
    source: EventSource, gpu: GpuSpec | None = None, **options: Unpack[ReplayOptions]
) -> ReplayComparison:
    """Replay a source through one allocator, then through all others to be compared.

    Args:
        source: the events.
        gpu: the GPU; None for a device that never runs out of memory.
        options: see `ReplayOptions`.

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
    device = device_of(gpu)

    def made(name: str, settings: str) -> NewAllocator:
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
    shown = result.failure.event - 1 if result.failure else result.peak_reserved_sample.event
    segments, owners = state_after(events, made(policy, config).allocator, shown)
    recorded = source.recorded
    told = config if policy == "pytorch" else ""
    return ReplayComparison(
        source=source,
        gpu=gpu,
        trials=tuple(trials),
        recommendation=best(trials),
        curve=course,
        shown_event=shown,
        segments=segments,
        owners=owners,
        verification=verify(recorded.snapshot, recorded.recording, recorded.start, told)
        if recorded and can_verify(recorded.recording, recorded.start)
        else None,
        composition=compose(*recorded) if recorded else None,
    )


def device_of(gpu: GpuSpec | None) -> AllocatorDevice:
    """Return the device model of a GPU: its usable memory, minus its context and kernels."""
    if gpu is None:
        return AllocatorDevice()
    major = gpu.compute_capability[0] if gpu.compute_capability else None
    return AllocatorDevice(capacity=gpu.usable_bytes, used=gpu.context_bytes, capability_major=major)


def _trial(
    events: Sequence[Event],
    policy: str,
    config: str,
    new_allocator: Callable[[str, str], NewAllocator],
    *,
    strict: bool,
) -> Trial:
    """Replay another allocator. Unless `strict`, one that cannot run (for example without a GPU) is skipped."""
    try:
        found = new_allocator(policy, config)
    except InputError as error:
        if strict:
            raise
        return Trial(policy, config, None, str(error))
    return Trial(policy, config, run(_for(events, found), found.allocator, found.notes))


def _for(events: Sequence[Event], new_allocator: NewAllocator) -> Sequence[Event]:
    """Return the events that reach the allocator."""
    return events if new_allocator.paddle is None else transformed(events, new_allocator.paddle)


def _followed(
    events: Sequence[Event], new_allocator: NewAllocator
) -> tuple[ReplayResult, MemoryCurve, Sequence[Event]]:
    """Replay the events; return the result, and the curve of allocated and reserved memory."""
    allocated: list[int] = []
    reserved: list[int] = []
    counters = new_allocator.allocator.counters

    small, large, held = counters.small, counters.large, counters.reserved

    def note() -> None:  # once per event: inlined instead of calling the counters' properties
        allocated.append(small.allocated_now + large.allocated_now)
        reserved.append(held.current)

    events = _for(events, new_allocator)
    result = run(events, new_allocator.allocator, new_allocator.notes, after_each=note)
    return result, MemoryCurve(timeline(events), allocated, reserved), events


# The trials of --compare: each allocator with default settings, and common settings of the PyTorch allocator.
COMPARED = (
    ("pytorch", ""),
    ("pytorch", "expandable_segments:True"),
    ("pytorch", "max_split_size_mb:128"),
    ("pytorch", "max_split_size_mb:512"),
    ("pytorch", "roundup_power2_divisions:8"),
    ("paddle-auto-growth", ""),
    ("paddle-naive-best-fit", ""),
    ("tensorflow", ""),
    ("tensorflow", "allow_growth=true"),
    ("ideal", ""),
)
NONE = "none"  # in a sweep: the setting is omitted


def swept(policy: str, config: str, sweeps: Iterable[str]) -> list[str]:
    """Return the settings of a sweep, with one value of each "key=v1,v2,none" replaced at a time.

    Raises:
        InputError: for a sweep with invalid syntax.
    """
    axes = []
    for sweep in sweeps:
        key, equals, values = sweep.partition("=")
        words = re.findall(r"(?:\[[^\]]*\]|[^,\[])+", values)
        if not equals or not key or not words:
            raise InputError(
                f"{sweep!r} does not name a setting with values.",
                "Write key=value,value, such as max_split_size_mb=32,128,none.",
            )
        axes.append([(key.strip(), word.strip()) for word in words])
    return [_with(policy, config, choice) for choice in product(*axes)]


def _with(policy: str, config: str, choice: Iterable[tuple[str, str]]) -> str:
    """Return the settings with some of them replaced; "none" removes one."""
    joint = ":" if policy == "pytorch" else "="
    pairs = re.findall(r"(?:\[[^\]]*\]?|[^,\[])+", config)
    for key, value in choice:
        pairs = [
            pair
            for pair in pairs
            if re.split("[:=]", pair.strip())[0].removeprefix("FLAGS_") != key.removeprefix("FLAGS_")
        ]
        if value.lower() != NONE:
            pairs.append(f"{key}{joint}{value}")
    return ",".join(pairs)
