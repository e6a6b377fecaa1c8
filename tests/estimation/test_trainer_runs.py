"""Runs of Hugging Face's Trainer, recorded on the null device, beside the estimate of the same arguments."""

from __future__ import annotations

import pytest

from tests.thinning import quick_every
from tools.trainer import Compared, compared

# What blocks keep of larger ones depends on all earlier allocations; the allocator replay has that.
RESTS = (0.01, 0.004)

# One request of V·d in fp32 finds no room in segments where the replay's does: 524,288,000 bytes.
SEGMENT = pytest.mark.xfail(strict=True, reason="one segment more than the replay reserves, 5 %")
ONE_MORE = ("mistral-bf16-adafactor",)


@pytest.mark.parametrize("run", quick_every(4, compared()), ids=lambda run: run.case["case"])
def test_the_peak_is_the_estimates(run: Compared) -> None:
    for of, rests in enumerate(RESTS, 1):
        error = run.error("allocated", of)
        assert error is not None
        assert abs(error) < rests


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(
            run,
            id=run.case["case"],
            marks=[*[SEGMENT] * run.case["case"].endswith(ONE_MORE), *[pytest.mark.long] * (at % 2)],
        )
        for at, run in enumerate(compared())
    ],
)
def test_reserved_memory_is_the_replays(run: Compared) -> None:
    reserved = run.error("reserved", 2)
    assert reserved is not None
    assert abs(reserved) < RESTS[1]
