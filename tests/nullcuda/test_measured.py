"""The whole CUDA path of `measure`, on the null device: what a GPU would do, so that it cannot rot where there is none."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import memcalc
from memcalc.api import compare_measured
from memcalc.ledger.component import Component
from memcalc.ledger.result import Result
from memcalc.measuring.measure import MeasurementOutOfMemory
from memcalc.validation.single_run import check_fits


def asked_for(result: Result, phase: str) -> dict[Component, int]:
    """Without what the allocator adds: a trace is watched, so that later blocks lie elsewhere."""
    components = result.ledger.components(phase)
    return {kind: size for kind, size in components.items() if kind is not Component.BLOCK_ROUNDING}


def test_three_numbers_in_every_phase_and_each_allocation(null_python: str, tmp_path: Path) -> None:
    """Counters, NVML and the allocator's history agree; fake tensors agree where most is held."""
    record = tmp_path / "records.jsonl"
    run = ("b=1", "s=1024", "l=2", "attention=eager", "recipe=pure", "dropout=0.1")
    found = memcalc.measure("gpt2", *run, device="null:h100-80gb", python=null_python, record=record)

    # The history's events through the simulator give the counters again.
    assert found.analysis.ledger.totals == {phase.name: phase.peak_allocated_bytes for phase in found.phases}
    # Device memory: reserved memory, and the context, which is listed separately.
    assert found.device.source == "nvml"
    assert {(p.device_bytes or 0) - (p.reserved_bytes or 0) for p in found.phases} == {found.device.context_bytes}
    assert any("CUDA context" in note for note in found.result.notes)
    workspaces = found.result.ledger.components("backward_2")[Component.LIBRARY_WORKSPACE]
    assert workspaces == 2 * 32 * 2**20  # forward's and backward's, each 32 MiB on Hopper
    fake = compare_measured(found, "fake").traces[0]
    for phase in ("model", "input", "forward_1", "loss_2", "backward_1", "backward_3"):
        assert asked_for(fake, phase) == asked_for(found.result, phase)
    kept = json.loads(record.read_text())
    assert kept["device"]["release"] == "null device"
    assert {"python", "torch", "cuda", "cudnn", "nccl"} <= set(kept["versions"])


@pytest.mark.long
def test_workspaces_are_distinguished_from_tensors_of_their_size(null_python: str) -> None:
    """Hopper's, 32 MiB, beside products of 2·2048·8192 bytes: every component is the trace's."""
    sizes = ("l=2", "V=4096", "b=1", "s=2048", "recipe=pure")
    found = memcalc.measure("llama-3.2-1b", *sizes, device="null:h100-80gb", python=null_python, steps=2)
    (traced,) = compare_measured(found, "null", python=null_python).traces

    assert found.result.ledger.components("backward_2")[Component.LIBRARY_WORKSPACE] == 2 * 32 * 2**20
    for phase in found.phases:
        assert found.result.ledger.components(phase.name) == traced.ledger.components(phase.name)


@pytest.mark.long
def test_allocator_settings_are_honoured_and_recorded(null_python: str) -> None:
    settings = "expandable_segments:True"
    options: Any = {"device": "null:a100-80gb", "python": null_python, "steps": 1}
    plain = memcalc.measure("gpt2", "l=2", "V=3000", **options)
    found = memcalc.measure("gpt2", "l=2", "V=3000", **options, alloc_conf=settings)

    assert found.allocator == f"PYTORCH_CUDA_ALLOC_CONF={settings}"
    assert plain.allocator == ""
    assert [p.reserved_bytes for p in found.phases] != [p.reserved_bytes for p in plain.phases]
    assert found.analysis.replay is not None
    assert found.analysis.replay.result.peak_reserved == max(p.peak_reserved_bytes or 0 for p in found.phases)


@pytest.mark.long
def test_a_run_that_dies_says_what_would_have_lived(null_python: str, tmp_path: Path) -> None:
    record = tmp_path / "records.jsonl"
    run = ("b=8", "l=12", "attention=eager", "recipe=pure")
    with pytest.raises(MeasurementOutOfMemory) as caught:
        memcalc.measure("gpt2-xl", *run, device="null:t4", steps=1, python=null_python, record=record, force=True)
    message = str(caught.value)

    assert re.match(
        r"gpt2-xl ran out of memory in forward_1: CUDA out of memory\. Tried to allocate 400\.00 MiB", message
    )
    assert f"The record up to that point is in {record}." in message
    assert "The simulated allocator fails at the same request, of 400.0 MiB." in message
    assert "Would have fitted: --set training.micro_batch_size=2" in message
    kept = json.loads(record.read_text())
    assert (kept["outcome"], kept["phases"][-1]["name"]) == ("out of memory", "forward_1")


@pytest.mark.long
def test_a_model_that_is_larger_than_the_gpu_is_not_started(null_python: str) -> None:
    with pytest.raises(memcalc.MemcalcError, match=r"alone need .*--force") as caught:
        memcalc.measure("llama-3-8b", "s=8", device="null:t4", python=null_python)
    assert caught.value.exit_code == 3


@pytest.mark.long
def test_settings_that_pytorch_refuses(null_python: str) -> None:
    with pytest.raises(
        memcalc.MemcalcError, match="PyTorch rejects PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:1"
    ) as caught:
        memcalc.measure("gpt2", device="null:t4", python=null_python, alloc_conf="max_split_size_mb:1")
    assert caught.value.exit_code == 3


@pytest.mark.long
def test_a_gpu_that_is_not_counted(null_python: str) -> None:
    from memcalc.validation.workers import worker_for

    with worker_for("null:t4", null_python) as (worker, _):
        with pytest.raises(memcalc.MemcalcError, match="device = cuda:3, but there are 1 GPUs"):
            worker.describe("cuda:3")
        device, versions = worker.describe("cuda:0")
        with pytest.raises(memcalc.MemcalcError, match="cannot fit null:t4"):
            check_fits(memcalc.load("llama-3-8b"), device)

    assert (device.identifier, device.name) == ("null:t4", "Tesla T4")
    assert versions["torch"].endswith("+cu130")
