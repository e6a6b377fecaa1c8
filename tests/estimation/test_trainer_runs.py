"""Runs of Hugging Face's Trainer, recorded on the null device, beside the estimate of the same arguments."""

from __future__ import annotations

import pytest

from tools.trainer import Compared, compared

# What blocks keep of larger ones depends on everything that was allocated before; a rehearsal plays that.
RESTS = (0.01, 0.004)

# Its optimizer's temporaries find no room in segments where the rehearsal's do: one of V·d in fp32, 524,288,000 bytes.
SEGMENT = pytest.mark.xfail(strict=True, reason="one segment more than the rehearsal reserves, 5.4 %")


@pytest.mark.parametrize("run", compared(), ids=lambda run: run.case["case"])
def test_the_peak_is_the_estimates(run: Compared) -> None:
    for of, rests in enumerate(RESTS, 1):
        error = run.error("allocated", of)
        assert error is not None
        assert abs(error) < rests


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(run, id=run.case["case"], marks=[SEGMENT] if "mistral-bf16-adafactor" in run.case["case"] else [])
        for run in compared()
    ],
)
def test_what_is_reserved_is_the_rehearsals(run: Compared) -> None:
    reserved = run.error("reserved", 2)
    assert reserved is not None
    assert abs(reserved) < RESTS[1]
