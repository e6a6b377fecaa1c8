"""`memcalc measure` on the CPU, small."""

import json
from pathlib import Path

import jsonschema
import pytest

from memcalc.report.schema import result_schema

pytest.importorskip("torch")

TINY = ["gpt2", "--set", "num_layers=1", "--set", "s=32", "--set", "vocab_size=64", "--device", "cpu"]

# Products of bf16 matrices take scratch memory on some CPUs.
FP32 = ["--set", "recipe=fp32", "--set", "dtype=fp32", "--set", "attention=eager"]


def test_the_screen(run, golden, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdict, what was off, then components and phases; on the CPU traces are exact, but for ten bytes in a step."""
    monkeypatch.setenv("COLUMNS", "100")
    out = run("measure", *TINY, "--steps", "2", *FP32).out

    golden("measure_cpu", out)


@pytest.mark.long
def test_json_is_the_document(run, tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    files = ["--record", str(record), "--export", str(tmp_path / "run.jsonl")]
    code, out, _ = run("measure", *TINY, "--steps", "1", "--format", "json", "--trace", "none", *files)
    document = json.loads(out)
    record_line = json.loads(record.read_text())

    assert code == 0
    jsonschema.validate(document, result_schema())
    assert (document["source"], document["device"]) == ("measure", "cpu")
    assert (document["estimate"]["source"], document["traces"]) == ("estimate", [])
    assert document["measurement"]["phases"] == record_line["phases"]
    assert (tmp_path / "run.jsonl").stat().st_size > 10_000


@pytest.mark.long
def test_estimate_with_a_measurement_beside_it(run) -> None:
    document = json.loads(run("estimate", *TINY, "--measure", "--format", "json").out)

    assert (document["source"], document["measured"]["source"]) == ("estimate", "measure")


def test_a_run_that_cannot_fit_is_not_started(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memcalc.proving.headroom.host_bytes", lambda: 2**20)
    code, out, err = run("measure", *TINY, "--headroom")

    assert (code, out) == (3, "")
    assert err.startswith("error: gpt2 cannot fit cpu, says the estimate: 0.")
    assert err.endswith(" of 0.00 GiB that are there. Run it all the same with --force.\n")


def test_unknown_traces_are_refused(run) -> None:
    code, _, err = run("measure", *TINY, "--trace", "real")

    assert code == 2
    assert err == "error: --trace: trace = 'real' is not known. Name fake or null.\n"


def test_without_torch_it_is_unavailable(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    code, out, err = run("measure", *TINY)

    assert (code, out) == (3, "")
    assert err.startswith("error: measure runs the training step in PyTorch: pip install ")
