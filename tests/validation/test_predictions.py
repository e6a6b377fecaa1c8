"""Predictions for a measured run use the PyTorch version that ran it, regardless of the version in its configuration."""

from __future__ import annotations

import pytest

import memcalc
from memcalc.measuring.records import RECORDS
from memcalc.validation.predictions import under
from memcalc.validation.summary import predicted
from tools.measured_runs import of_gpus


@pytest.mark.parametrize(
    ("torch", "release"),
    [("2.11.0+cu130", "v2.11"), ("2.6.0", "v2.6"), ("2.13.0a0+git1234", "v2.13"), ("2.99.0", "v2.13"), ("", "v2.13")],
)
def test_the_release_that_ran_takes_the_place_of_the_configurations(torch: str, release: str) -> None:
    """But one that memcalc has no rules for."""
    assert under(memcalc.load("gpt2"), torch).training.torch_version == release


def test_the_replay_of_an_h200_run_under_2_11_is_byte_exact() -> None:
    """PyTorch 2.13 breaks ties between blocks otherwise: 9,321,840,640 bytes, a tenth less."""
    words = "llama-3.2-1b --set b=1 --set s=2048 --set lora.rank=8"
    (record,) = (each for path in of_gpus("finetune") for each in RECORDS.read(path) if words in each["command"])
    found = predicted(record)

    assert found is not None
    assert found.predicted.headline.reserved_bytes == found.measured.headline.reserved_bytes == 10_355_736_576
    assert record["spec"]["training"]["torch_version"] == "v2.13"
