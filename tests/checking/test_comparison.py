"""`memcalc diff`: two runs beside each other."""

import json

import pytest

import memcalc
from memcalc.cli.app import main


def test_components_sum_to_both_peaks() -> None:
    difference = memcalc.diff("gpt2", memcalc.load("gpt2", "b=8"))

    assert sum(line.a or 0 for line in difference.components) == difference.a.ledger.peak_bytes
    assert sum(line.b or 0 for line in difference.components) == difference.b.ledger.peak_bytes


def test_a_run_does_not_differ_from_itself() -> None:
    difference = memcalc.diff("gpt2", "gpt2", gpu="t4")

    assert {line.difference for line in (*difference.components, *difference.totals, *difference.phases)} == {0}


def test_overrides_of_one_side(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "gpt2", "gpt2", "--set", "b=2", "--set-b", "b=4", "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)

    assert document["components"]["weights"]["difference"] == 0
    assert document["components"]["activations"]["difference"] > 0


@pytest.mark.parametrize("form", ["table", "markdown"])
def test_screens(form: str, golden, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    line = ["diff", "llama-3-8b", "llama-3-8b", "--set-b", "zero_stage=3", "--set-b", "data_parallel=8"]
    assert main([*line, "--gpu", "h100-80gb", "--format", form]) == 0

    golden(f"diff_{form}", capsys.readouterr().out)
