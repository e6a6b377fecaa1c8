"""Every record that `measure` made, against the predictions of today: a bar for each group, so that none can rot."""

from __future__ import annotations

import pytest

from memcalc.validation.record_comparison import operator_differences
from memcalc.validation.summary import errors_of, summary
from tools.measured_runs import compared, groups, kept_traces, probes

# Median and worst of the absolute errors. On a null device what is requested is exact, and how it lies is PyTorch's.
ALLOCATED = {"null cuda": (0.001, 0.01), "cuda": (0.0005, 0.003), "cpu": (0.001, 0.02)}

GROUPS = groups()

# Of the recorded rules, which are those of the day: efficient attention's are today's in tests/workspaces/test_rules.py.
RULED_ANEW = {"attention, memory-efficient"}


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", GROUPS)
def test_the_estimate_is_within_the_bar_of_its_group(name: str, every: int) -> None:
    """And weights are exact, in shares of each run's peak.

    But for bases in 4 bits: what their kernels make of the weights has no name, so records call it workspace.
    """
    records = GROUPS[name][::every]
    found = {errors.name: errors for errors in summary(records)}
    median, worst = ALLOCATED[name.partition(",")[0]]
    allocated = found["allocated"]

    assert sorted(map(abs, allocated.shares))[len(allocated.shares) // 2] <= median
    assert abs(allocated.worst) <= worst
    named = [record for record in records if record["spec"]["training"].get("finetune") != "qlora"]
    found = {errors.name: errors for errors in summary(named)}
    assert abs(found["weights"].worst) < 1e-6
    assert abs(found["master_weights"].worst) < 1e-6


@pytest.mark.parametrize("name", GROUPS)
def test_components_sum_to_what_the_device_counted(name: str) -> None:
    for record in GROUPS[name]:
        for phase in record["phases"]:
            assert sum(phase["components"].values()) == phase["peak_allocated_bytes"]


# With a GPU: the requested bytes. The trial run has PyTorch's own allocator on the same requests.
EXACT, WORST = 0.8, 0.005


@pytest.mark.parametrize(("name", "prediction"), kept_traces())
def test_traces_are_within_the_bar(name: str, prediction: str) -> None:
    """0 bytes for at least 80 % of the runs, 0.5 % for all: of runs with memory that does not depend on values."""
    runs = [run for run in kept_traces()[name, prediction] if run.measured.spec.model.moe is None]
    allocated = {each.name: each for each in errors_of(runs)}["allocated"]

    assert len(runs) >= 60
    assert allocated.exact >= EXACT
    assert abs(allocated.worst) <= WORST


def test_every_kept_trace_names_each_component_as_measured() -> None:
    """Workspaces are distinguished from tensors of the same size, so components are the same where peaks are."""
    for each in compared():
        for run in each.of("null"):
            assert operator_differences(run) == []
            phase = run.measured.ledger.peak_phase
            assert run.predicted.ledger.components(phase) == run.measured.ledger.components(phase)
        for trace in ("fake", "null"):
            said, dead = each.predicted_failures(trace)
            assert said == dead >= 3


def test_there_are_records_of_a_whole_sitting() -> None:
    assert max(len(records) for records in GROUPS.values()) >= 66
    assert any(record["outcome"] == "out of memory" for records in GROUPS.values() for record in records)


def test_hidden_workspaces_are_as_the_rules_say() -> None:
    """All but 2.11's separate workspace of cublasLt, flash's copies of what lies head by head, and cuDNN's attention.

    Hopper takes cuDNN's attention by itself ("default"): 256 bytes in forward, and in backward flash's without its
    rounding, so that it is never much larger.
    """
    ruled = [line for line in probes() if line["rule"] is not None]
    differ = {line["operator"] for line in ruled if line["hidden"] != line["rule"]}

    assert len(ruled) >= 220
    assert differ <= {"linear with bias", "attention, flash", "attention, default", "grouped_mm"} | RULED_ANEW
    for line in ruled:
        if line["operator"] == "attention, default":
            assert line["hidden"] <= line["rule"] + 256
        elif line["operator"] == "linear with bias":
            assert line["hidden"] - line["rule"] in {0, 2**20}
