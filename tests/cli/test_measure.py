"""`memcalc measure` on the CPU, small."""

import json
from pathlib import Path

import jsonschema
import pytest

from memcalc.report.schema import result_schema

pytest.importorskip("torch")

TINY = ["gpt2", "--set", "num_layers=1", "--set", "s=32", "--set", "vocab_size=64", "--device", "cpu"]


def test_a_table_of_phases(run) -> None:
    code, out, _ = run("measure", *TINY, "--steps", "2")
    lines = [line.split() for line in out.splitlines()]
    phases = [line[0] for line in lines if len(line) == 5 and line[-1].endswith("%")]

    assert code == 0
    assert phases[:4] == ["model", "optimizer", "input", "zero_grad_1"]
    assert phases[-1] == "optimizer_step_2"


def test_json_is_the_document(run, tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    code, out, _ = run("measure", *TINY, "--steps", "1", "--format", "json", "--record", str(record))
    document = json.loads(out)

    assert code == 0
    jsonschema.validate(document, result_schema())
    assert (document["source"], document["device"]) == ("measure", "cpu")
    assert record.stat().st_size > 0


def test_estimate_with_a_measurement_beside_it(run) -> None:
    table = run("estimate", *TINY, "--measure").out
    document = json.loads(run("estimate", *TINY, "--measure", "--format", "json").out)

    assert "Measured on cpu\n" in table
    assert (document["source"], document["measured"]["source"]) == ("estimate", "measure")


def test_without_torch_it_is_unavailable(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    code, out, err = run("measure", *TINY)

    assert (code, out) == (3, "")
    assert err.startswith("error: measure runs the training step in PyTorch: pip install ")
