"""Every kind of run of the project's suite, cut to a tiny size and run on the CPU: the record is the trace's, to the byte."""

from __future__ import annotations

import gc
from functools import partial
from itertools import groupby
from pathlib import Path

import pytest
import torch

from memcalc.events.event import Event, EventType
from memcalc.measuring.counters import CpuCounters, RecorderCounters
from memcalc.measuring.cpu_profile import levels
from memcalc.recorder.observer import RecordingObserver
from memcalc.recorder.real_device import record_instrumented, record_real
from memcalc.spec.spec import Spec
from memcalc.step.loop import TrainingRun
from memcalc.tracing.session import fake_cpu
from memcalc.validation.suite import SuiteRun, load_suite

RUNS = load_suite(Path(__file__).parents[2] / "benchmarks" / "suite.yaml").runs
SIZES = ("num_layers=2", "hidden_size=64", "num_attention_heads=4", "head_dim=16", "vocab_size=97", "s=24")

# Kinds that the CPU has no kernel for.
MISSING = ("memory-efficient",)


def tiny(run: SuiteRun) -> Spec:
    """The run with every size cut, and at most two sequences."""
    source, *given = run.overrides.split()
    small = [f"b={min(2, run.spec().training.micro_batch_size)}", *SIZES]
    if run.spec().model.num_key_value_heads < run.spec().model.num_attention_heads:
        small.append("num_key_value_heads=2")
    if run.spec().model.position_embedding == "rope":
        small.append("rotary_dim=16")
    kept = [word for word in given if word.partition("=")[0] not in CUT]
    return SuiteRun(" ".join([source, *kept])).spec(*small, "intermediate_size=96")


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
    for frees, alike in groupby((e._replace(time_us=None) for e in events), lambda e: e.kind is EventType.FREE):
        run = list(alike)
        found += sorted(run, key=lambda event: event.storage) if frees else run
    return found


def test_the_cut_suite_is_the_suite() -> None:
    """Every kind is there, and most run on the CPU."""
    assert len(KINDS) >= 55
    assert sum(tiny(run).training.attention in MISSING for run in KINDS) <= 4


KINDS = [run for run in dict.fromkeys(RUNS) if not run.alloc_conf and run.steps == 2]


@pytest.mark.long
@pytest.mark.parametrize("run", KINDS, ids=lambda run: run.overrides)
def test_the_record_is_the_traces(run: SuiteRun) -> None:
    spec = tiny(run)
    if spec.training.attention in MISSING:
        pytest.skip("no kernel on the CPU")
    real = record_instrumented(TrainingRun(spec, torch.device("cpu")), 2)
    with fake_cpu() as session:
        other = TrainingRun(spec, session.device)
        other.execute(2, RecordingObserver(other, session.recorder))
        events = session.recorder.events()

    assert real.failed is None
    assert ordered(events) == ordered(real.events)
    assert len(real.events) > 200


@pytest.mark.long
@pytest.mark.parametrize("run", KINDS, ids=lambda run: run.overrides)
def test_what_the_profiler_saw_beyond_the_record_operators_kept_to_themselves(run: SuiteRun) -> None:
    """Left out what is allocated and freed inside one call, numbers, and the generator's states: 0 bytes of difference.

    What is left out was never in a tensor that a step can name: a dispatch mode cannot see it, and on CUDA it is other.
    """
    spec = tiny(run)
    if spec.training.attention in MISSING:
        pytest.skip("no kernel on the CPU")
    gc.collect()
    counters, heard = CpuCounters(), RecorderCounters()
    with counters.recording():
        recorded = record_real(partial(TrainingRun, spec, torch.device("cpu")), 2, counters)
    heard.hear(recorded.events)
    profiled = counters.profiled
    assert profiled is not None

    seen: dict[str, int] = {}
    for level in levels([life for life in profiled.lives if life.inside is None], profiled.spans):
        seen[level.phase] = max(seen.get(level.phase, 0), level.peak)
    assert seen == {phase.name: phase.peak_allocated_bytes for phase in heard.phases}
    for phase, record in zip(counters.phases, heard.phases, strict=True):
        beyond = phase.peak_allocated_bytes - record.peak_allocated_bytes
        assert 0 <= beyond <= sum((phase.inside or {}).values())
