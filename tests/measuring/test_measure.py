"""Measuring on the CPU: figures that can be worked out by hand, and what stops a run. Inside this process: see Worker."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from memcalc.documents.result import document
from memcalc.documents.schema import documents
from memcalc.errors import InputError, OutOfMemory, Unavailable
from memcalc.extras import installation
from memcalc.ledger.row_drafts import phase_names
from memcalc.measuring import Measurement, measure
from memcalc.measuring.devices import SOMEBODYS_BYTES, View
from memcalc.measuring.job import Job, encoded, job_from
from memcalc.measuring.measure import MeasurementOutOfMemory, measured, refuse_death
from memcalc.measuring.records import RECORDS
from memcalc.measuring.run_process import answer, refuse_busy
from memcalc.spec.loading import load

TINY = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64, "max_position_embeddings": 16}


def spec(**training: Any) -> Any:
    return load({"name": "tiny", "model": TINY, "training": {"sequence_length": 16, "dropout": 0.0} | training})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Measures as the child process does, through the lines that it reads and writes."""

    def execute(what: Any, steps: int = 1, device: str = "cpu") -> Measurement:
        events = tmp_path_factory.mktemp("measured") / "events.jsonl"
        job = job_from(Job(what, steps, device, "", str(events)).line())
        found = json.loads(encoded(answer(job)))
        if "refused" in found:
            raise {"InputError": InputError, "Unavailable": Unavailable}[found["refused"][0]](found["refused"][1])
        return measured(job, found, "memcalc measure tiny")

    return execute


@pytest.fixture(scope="module")
def found(run: Any) -> Measurement:
    """Two steps; tests/cli/test_measure.py has a run in a process of its own."""
    measurement: Measurement = run(spec(), steps=2)
    return measurement


def test_phases_are_all_there(found: Measurement) -> None:
    assert tuple(phase.name for phase in found.phases) == phase_names(2)


def test_bytes_that_can_be_worked_out_by_hand(found: Measurement) -> None:
    """P = 2 (12 d^2 + 13 d) + V d + S d + 2 d; mixed-20 holds 2 + 4 bytes of each after `optimizer`."""
    parameters = 2 * (12 * 32**2 + 13 * 32) + 64 * 32 + 16 * 32 + 2 * 32
    by_name = {phase.name: phase for phase in found.phases}

    assert found.parameters == found.trainable == parameters
    assert by_name["model"].end_allocated_bytes == 2 * parameters
    assert by_name["optimizer"].end_allocated_bytes == 6 * parameters
    assert by_name["input"].end_allocated_bytes == 6 * parameters + 2 * 8 * 16
    assert (
        by_name["optimizer_step_2"].end_allocated_bytes - by_name["zero_grad_2"].end_allocated_bytes == 6 * parameters
    )


def test_each_phase_sums_to_its_measured_peak(found: Measurement) -> None:
    assert {p.name: p.peak_allocated_bytes for p in found.phases} == found.result.ledger.totals
    assert all(row.bytes > 0 for row in found.result.ledger.rows)
    assert (found.result.source, found.result.confidence, found.result.device) == ("measure", "measured", "cpu")


def test_what_the_profiler_saw_beyond_the_record_is_within_operators(found: Measurement) -> None:
    """By name: in an optimizer step a number of 8 bytes and its cast, 4, to what it is multiplied with."""
    for phase in found.phases:
        beyond = phase.peak_allocated_bytes - found.analysis.ledger.totals[phase.name]
        assert 0 <= beyond <= sum((phase.inside or {}).values())
    named = {
        row.tensor: row.bytes for row in found.result.ledger.live_rows("optimizer_step_2") if "inside" in row.tensor
    }
    assert sum(named.values()) == 12
    assert all(name.startswith("inside aten._foreach_") for name in named)


def test_a_record_tells_who_held_the_peak_and_how_long_it_took(found: Measurement) -> None:
    record = found.to_record()
    seconds = dict(record["seconds"])

    assert sum(record["operators"].values()) == found.peak.peak_allocated_bytes
    assert record["operators"]["aten.empty"] > 0
    assert list(seconds) == ["device", "build", "steps", "all"]
    assert min(seconds.values()) >= 0
    assert seconds["all"] >= seconds["build"] + seconds["steps"] - 0.01


def test_components_are_distinguished(found: Measurement) -> None:
    """In a loss: 2 bytes of weights, 4 of masters, and the states 8 bytes and two counters of 4 for each tensor."""
    parts = {kind.value: size for kind, size in found.result.ledger.components("loss_2").items()}

    assert parts["weights"] == 2 * found.parameters
    assert parts["master_weights"] == 4 * found.parameters
    assert parts["activations"] > 0
    assert parts["logits_and_loss"] > 0


def test_the_document_is_valid(found: Measurement) -> None:
    text = json.dumps(document(found.result))

    assert documents()["estimate"].validate_json(text)["peak"]["allocated_bytes"] == found.peak.peak_allocated_bytes


def test_amp_and_accumulation_run_on_the_cpu(run: Any) -> None:
    assert tuple(phase.name for phase in run(spec(recipe="amp", gradient_accumulation_steps=2)).phases) == phase_names(
        1
    )


def test_measuring_again_gives_the_same_bytes(run: Any) -> None:
    assert run(spec(recipe="pure")).phases == run(spec(recipe="pure")).phases


def test_a_record_has_all_that_a_figure_depends_on(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "new" / "records.jsonl"
    measurement = run(spec(recipe="pure"))
    for _ in range(2):
        RECORDS.append((measurement.to_record(),), file)
    first, second = RECORDS.read(file)

    assert first == second
    assert first["record"] == 2
    assert first["command"] == "memcalc measure tiny"
    assert (first["device"]["identifier"], first["device"]["kind"]) == ("cpu", "cpu")
    assert first["versions"]["torch"] == torch.__version__
    assert [phase["name"] for phase in first["phases"]] == list(phase_names(1))
    assert all(sum(phase["components"].values()) == phase["peak_allocated_bytes"] for phase in first["phases"])
    assert load(first["spec"]) == spec(recipe="pure")
    assert (first["outcome"], first["steps"]) == ("done", 1)


def test_out_of_memory_keeps_the_record(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    monkeypatch.setattr("memcalc.step.loop.TrainingRun._micro_batch", full)
    measurement = run(spec())
    record = measurement.to_record()

    assert record["outcome"] == "out of memory"
    assert record["phases"][-1]["name"] == "zero_grad_1"
    with pytest.raises(
        MeasurementOutOfMemory, match=r"tiny ran out of memory .*Tried to allocate 2\.00 GiB.*in f\.jsonl"
    ) as caught:
        refuse_death(measurement, tmp_path.with_name("f.jsonl").name)
    assert caught.value.exit_code == OutOfMemory.exit_code == 4
    assert caught.value.measurement is measurement


def test_a_cublas_handle_without_memory_is_out_of_memory(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an H100 ended qwen3-8b at a micro-batch of 25: gpu/h100-80gb-torch-2.11.0/near-20261127.jsonl."""

    def full(*_: Any) -> None:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

    monkeypatch.setattr("memcalc.step.loop.TrainingRun._micro_batch", full)
    measurement = run(spec())
    assert measurement.to_record()["outcome"] == "out of memory"
    with pytest.raises(MeasurementOutOfMemory, match="tiny ran out of memory in zero_grad_1: CUDA error: CUBLAS"):
        refuse_death(measurement, None)


def test_the_cpus_own_message_is_out_of_memory_too(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A petabyte, from the real allocator."""
    monkeypatch.setattr("memcalc.step.loop.TrainingRun._random_tokens", lambda _: torch.empty(2**50, dtype=torch.int8))
    measurement = run(spec())

    assert measurement.outcome == "out of memory"
    assert "can't allocate memory" in str(measurement.message)


def test_no_gpu_is_one_message_with_a_way_out(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", None)

    with pytest.raises(Unavailable, match=r"built without CUDA\. Install .*--device cpu") as caught:
        run(spec(), device="cuda")
    assert caught.value.exit_code == 3


def test_a_driver_that_is_too_old_is_named_with_both_versions(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("memcalc.measuring.devices.driver_version", lambda: "12.4")

    with pytest.raises(Unavailable, match=r"too old: it knows CUDA 12\.4, and this PyTorch is built for CUDA 13\.0"):
        run(spec(), device="cuda")


def test_a_missing_gpu(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)

    with pytest.raises(Unavailable, match="device = cuda:1, but there are 1 GPUs, counted from 0"):
        run(spec(), device="cuda:1")


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (View(3 * 2**30, (41, 42), "570.1"), "cuda:0 is in use (3.00 GiB, process 41, 42). Wait"),
        (View(SOMEBODYS_BYTES, (), "570.1"), "cuda:0 is in use (0.25 GiB). Wait"),
        (View(SOMEBODYS_BYTES - 1, (), "570.1"), None),
        (None, None),
    ],
    ids=["others", "nobody knows who", "a screen", "nobody can be asked"],
)
def test_a_busy_device_is_left_alone(view: View | None, message: str | None) -> None:
    if message is None:
        refuse_busy(torch.device("cuda:0"), view)
        return
    with pytest.raises(Unavailable) as caught:
        refuse_busy(torch.device("cuda:0"), view)
    assert str(caught.value).startswith(message)
    assert "--force" in str(caught.value)


def test_attention_without_a_kernel_is_wrong_input(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setattr("memcalc.step.loop.TrainingRun._micro_batch", refuse)

    with pytest.raises(InputError, match="attention = memory-efficient has no kernel for fp32, head_dim = 8"):
        run(spec(dtype="fp32", recipe="fp32"))


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "cpu:1:2"])
def test_unknown_devices_are_refused(device: str, run: Any) -> None:
    with pytest.raises(InputError, match="cannot be measured"):
        run(spec(), device=device)


@pytest.mark.parametrize(("package", "extra"), [("torch", "torch"), ("transformers", "hf")])
def test_missing_packages_name_the_extra(package: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    present = object()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else present)

    with pytest.raises(Unavailable, match=re.escape(installation(extra))):
        measure(load("gpt2", ["implementation=huggingface"]), device="cpu")
