"""Runs of Hugging Face's Trainer, recorded on the null device, beside the estimate of the same arguments."""

from __future__ import annotations

import pytest

from tools.trainer import Compared, compared

# What blocks keep of larger ones depends on everything that was allocated before, here by the Trainer.
RESTS = 0.01


@pytest.mark.parametrize("run", compared(), ids=lambda run: run.case["case"])
def test_the_peak_is_the_estimates(run: Compared) -> None:
    error = run.error("allocated", 1)

    assert error is not None
    assert abs(error) < RESTS
