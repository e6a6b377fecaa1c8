"""Measuring on the CPU, the errors, and the records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from memcalc.errors import InputError, OutOfMemory, Unavailable
from memcalc.ledger.document import document
from memcalc.ledger.phases import phase_names
from memcalc.ledger.schema import Document
from memcalc.measuring import Measurement, measure
from memcalc.spec.loading import load

TINY = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64, "max_position_embeddings": 16}


def spec(**training: Any) -> Any:
    return load({"name": "tiny", "model": TINY, "training": {"sequence_length": 16, "dropout": 0.0} | training})


@pytest.fixture(scope="module")
def measured() -> Measurement:
    return measure(spec(), device="cpu", steps=2)


def test_phases_are_all_there(measured: Measurement) -> None:
    assert tuple(phase.name for phase in measured.phases) == phase_names(2)


def test_measuring_again_gives_the_same_bytes(measured: Measurement) -> None:
    assert measure(spec(), device="cpu", steps=2).phases == measured.phases


def test_bytes_that_can_be_worked_out_by_hand(measured: Measurement) -> None:
    """P = 2 (12 d^2 + 13 d) + V d + S d + 2 d; mixed-20 holds 2 + 4 bytes of each after `optimizer`."""
    parameters = 2 * (12 * 32**2 + 13 * 32) + 64 * 32 + 16 * 32 + 2 * 32
    by_name = {phase.name: phase for phase in measured.phases}

    assert measured.parameters == parameters
    assert by_name["model"].end_allocated_bytes == 2 * parameters
    assert by_name["optimizer"].end_allocated_bytes == 6 * parameters
    assert by_name["input"].end_allocated_bytes == 6 * parameters + 2 * 8 * 16
    assert (
        by_name["optimizer_step_2"].end_allocated_bytes - by_name["zero_grad_2"].end_allocated_bytes == 6 * parameters
    )


def test_each_phase_sums_to_its_measured_peak(measured: Measurement) -> None:
    result = measured.to_result()

    assert {p.name: p.peak_allocated_bytes for p in measured.phases} == result.ledger.totals
    assert all(row.bytes > 0 for row in result.ledger.rows)
    assert (result.source, result.confidence, result.device) == ("measure", "measured", "cpu")


def test_the_document_is_valid(measured: Measurement) -> None:
    text = json.dumps(document(measured.to_result()))

    assert Document.model_validate_json(text).peak.allocated_bytes == measured.peak.peak_allocated_bytes


def test_amp_and_accumulation_run_on_the_cpu() -> None:
    found = measure(spec(recipe="amp", gradient_accumulation_steps=2), device="cpu", steps=1)

    assert tuple(phase.name for phase in found.phases) == phase_names(1)


def test_records_are_appended_whole(tmp_path: Path) -> None:
    file = tmp_path / "new" / "records.jsonl"
    for _ in range(2):
        measure(spec(recipe="pure"), device="cpu", steps=1, record=file, command="memcalc measure tiny")
    lines = file.read_text().splitlines()
    first = json.loads(lines[0])

    assert len(lines) == 2
    assert first["record"] == 1
    assert first["command"] == "memcalc measure tiny"
    assert first["device"]["identifier"] == "cpu"
    assert first["versions"]["torch"] == torch.__version__
    assert [phase["name"] for phase in first["phases"]] == list(phase_names(1))
    assert load(first["spec"]) == spec(recipe="pure")
    assert first["outcome"] == "done"


def test_out_of_memory_keeps_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    monkeypatch.setattr("memcalc.step.loop.TrainingRun._micro_batch", full)
    file = tmp_path / "records.jsonl"

    with pytest.raises(OutOfMemory, match=r"tiny ran out of memory .*Tried to allocate 2\.00 GiB.*records\.jsonl"):
        measure(spec(), device="cpu", steps=1, record=file)
    record = json.loads(file.read_text())
    assert record["outcome"] == "out of memory"
    assert record["phases"][-1]["name"] == "zero_grad_1"
    assert OutOfMemory.exit_code == 4


def test_no_gpu_is_one_message_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    with pytest.raises(Unavailable, match="--device cpu") as caught:
        measure(spec())
    assert caught.value.exit_code == 3


def test_attention_without_a_kernel_is_wrong_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setattr("memcalc.step.loop.TrainingRun._micro_batch", refuse)

    with pytest.raises(InputError, match="attention = flash has no kernel for fp32, head_dim = 8"):
        measure(spec(dtype="fp32", recipe="fp32"), device="cpu", steps=1)


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "cpu:1:2"])
def test_unknown_devices_are_refused(device: str) -> None:
    with pytest.raises(InputError, match="cannot be measured"):
        measure(spec(), device=device)


@pytest.mark.parametrize(("package", "extra"), [("torch", "torch"), ("transformers", "hf")])
def test_missing_packages_name_the_extra(package: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    present = object()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else present)

    with pytest.raises(Unavailable, match=rf"pip install 'llm-memcalc\[{extra}\]'"):
        measure(load("gpt2", ["implementation=huggingface"]), device="cpu")
