"""Every kind of run of the project's suite, cut to a tiny size and run on the CPU: the record is the trace's, to the byte."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest
import torch

from memcalc.events.event import Event, Kind
from memcalc.proving.suite import Run, load_suite
from memcalc.recorder.observer import RecordingObserver
from memcalc.recorder.real import record_watched
from memcalc.spec.spec import Spec
from memcalc.step.loop import TrainingRun
from memcalc.tracing.session import fake_cpu

RUNS = load_suite(Path(__file__).parents[2] / "benchmarks" / "suite.yaml").runs
SIZES = ("num_layers=2", "hidden_size=64", "num_attention_heads=4", "head_dim=16", "vocab_size=97", "s=24")

# Kinds that the CPU has no kernel for.
MISSING = ("memory-efficient",)


def tiny(run: Run) -> Spec:
    """The run with every size cut, and at most two sequences."""
    source, *given = run.words.split()
    small = [f"b={min(2, run.spec().training.micro_batch_size)}", *SIZES]
    if run.spec().model.num_key_value_heads < run.spec().model.num_attention_heads:
        small.append("num_key_value_heads=2")
    if run.spec().model.position_embedding == "rope":
        small.append("rotary_dim=16")
    kept = [word for word in given if word.partition("=")[0] not in CUT]
    return Run(" ".join([source, *kept])).spec(*small, "intermediate_size=96")


CUT = {
    "b",
    "s",
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
}


def ordered(events: tuple[Event, ...]) -> list[Event]:
    """Without times; releases that follow each other sorted, since autocast's cache is emptied by address."""
    found: list[Event] = []
    for frees, alike in groupby((e._replace(time_us=None) for e in events), lambda e: e.kind is Kind.FREE):
        run = list(alike)
        found += sorted(run, key=lambda event: event.storage) if frees else run
    return found


KINDS = [run for run in dict.fromkeys(RUNS) if not run.alloc_conf and run.steps == 2]


@pytest.mark.long
@pytest.mark.parametrize("run", KINDS, ids=lambda run: run.words)
def test_the_record_is_the_traces(run: Run) -> None:
    spec = tiny(run)
    if spec.training.attention in MISSING:
        pytest.skip("no kernel on the CPU")
    real = record_watched(TrainingRun(spec, torch.device("cpu")), 2)
    with fake_cpu() as session:
        other = TrainingRun(spec, session.device)
        other.execute(2, RecordingObserver(other, session.recorder))
        events = session.recorder.events()

    assert real.died is None
    assert ordered(events) == ordered(real.events)
    assert len(real.events) > 200
