"""Runs under the null device: training steps that only the allocator watches, then watched by the dispatcher too.

unwatched.py SPECS.json, a list of specs; prints a list of pairs of streams: sizes allocated and freed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

import torch

from memcalc.events.event import Event, EventType
from memcalc.recorder.allocator_history import UnobservedHistory
from memcalc.recorder.real_device import record_instrumented, until_dead
from memcalc.spec.loading import load
from memcalc.spec.spec import Spec
from memcalc.step.loop import TrainingRun
from memcalc.step.skip_compiler import without_compiler

without_compiler()


def stream(events: Sequence[Event]) -> list[int]:
    """Releases that follow each other are in the order of their size: autocast's cache goes by addresses."""
    sizes: dict[int, int] = {}
    changes = []
    for event in events:
        if event.kind is EventType.ALLOC:
            sizes[event.storage] = event.bytes
            changes.append(event.bytes)
        elif event.kind is EventType.FREE and event.storage in sizes:
            changes.append(-sizes[event.storage])
    runs = groupby(changes, key=lambda size: size < 0)
    return [size for freed, run in runs for size in (sorted(run) if freed else run)]


def plain(spec: Spec) -> list[int]:
    device = torch.device("cuda", 0)
    history = UnobservedHistory(device)
    run = TrainingRun(spec, device)
    until_dead(run, 2, history)
    return stream(history.close())


def watched(spec: Spec) -> list[int]:
    run = TrainingRun(spec, torch.device("cuda", 0))
    return stream(record_instrumented(run, 2).events)


def in_fork(record: Callable[[Spec], list[int]], spec: Spec) -> list[int]:
    """Each run in a process with a new allocator and new libraries."""
    read, write = os.pipe()
    if os.fork() == 0:
        with os.fdopen(write, "w") as file:
            json.dump(record(spec), file)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        found: list[int] = json.load(file)
    os.wait()
    return found


specs = [load(fields, ()) for fields in json.loads(Path(sys.argv[1]).read_text())]
print(json.dumps([(in_fork(plain, spec), in_fork(watched, spec)) for spec in specs]))
