"""Searches of another program's file: each variant is what the file means with its values, in every candidate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import memcalc
from memcalc.search.maxima import Maximum
from memcalc.sweeping.verdict_terms import ANSWERS

# transformers pads the sequences of a batch, but not a batch of one: with b = 2 the candidates have masks, and
# releases differ that agree on b = 1.
ONE = """\
model_name_or_path: meta-llama/Llama-3.2-1B
per_device_train_batch_size: 1
bf16: true
"""
GPU = "a100-40gb"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "trainer.yaml"
    path.write_text(ONE)
    return path


def answer(file: Path, *settings: str) -> str:
    found = memcalc.estimate(file, *settings, gpu=GPU).verdict
    assert found is not None
    return found


def largest(file: Path, what: str) -> Maximum:
    return memcalc.fit(file, gpu=GPU, maximize=what).maxima[what]


def test_the_largest_micro_batch_of_a_file_is_the_one_that_estimate_says_fits(file: Path) -> None:
    found = largest(file, "micro_batch_size")
    result = memcalc.estimate(file, f"b={found.value}", gpu=GPU)

    assert found.overrides == (f"training.micro_batch_size={found.value}",)  # the mask follows
    assert found.result is not None
    assert found.result.spec.blocks == result.spec.blocks
    assert result.spec.training.padding_mask != memcalc.load(file).training.padding_mask
    assert found.result.verdict == result.verdict == "fits"
    assert found.next_verdict is not None
    assert found.next_verdict.answer == answer(file, f"b={found.next_value}") == "unknown"
    assert found.next_verdict.assumed  # with the newest transformers it fits


def test_a_sweep_of_a_file_has_the_peaks_of_its_estimates(file: Path) -> None:
    axes: dict[str, list[Any]] = {"b": [1, 2, 3], "s": [512, 2048], "recompute": ["none", "full"]}
    table = memcalc.sweep(file, axes, gpu=GPU)

    for number in range(len(table)):
        words = [f"{field}={value}" for field, value in table.point(number).items()]
        result = memcalc.estimate(file, *words, gpu=GPU)
        assert table.peak_bytes[number] == result.ledger.peak_bytes, words
        said = ANSWERS[table.verdict[number]]
        assert said in (result.verdict, "close"), words
    assert {ANSWERS[number] for number in table.verdict} == {"fits", "close"}


def test_a_hub_id_is_read_once_for_each_batch() -> None:
    """Runs that differ only in their batches are still estimated together."""
    table = memcalc.sweep("meta-llama/Llama-3.2-1B", {"b": [1, 2, 3], "s": [512, 1024]}, gpu=GPU)

    for number in range(len(table)):
        words = [f"{field}={value}" for field, value in table.point(number).items()]
        assert table.peak_bytes[number] == memcalc.estimate("meta-llama/Llama-3.2-1B", *words).ledger.peak_bytes


def test_the_largest_micro_batch_with_a_plan_is_read_from_the_file(file: Path) -> None:
    planning = memcalc.recompute(file, gpu=GPU, maximize=True)
    spec = planning.result.spec

    assert spec.training.micro_batch_size > 1
    assert spec.training.padding_mask != "none"
    assert spec.training.versions is not None
    assert spec.training.versions.transformers == "4.48.3"  # the candidate that needs most with this batch


def test_every_change_that_fits_is_read_from_the_file(file: Path) -> None:
    found = memcalc.fit(file, "b=3", gpu=GPU).smallest_changes

    assert found
    for each in found[:4]:
        gpu = None if any(word.startswith("hardware.gpu=") for word in each.change.overrides) else GPU
        assert memcalc.estimate(file, "b=3", *each.change.overrides, gpu=gpu).verdict == "fits", each.change.overrides
