"""Exponential moving average of the weights (`training.ema`): a further copy, created with the optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.estimation.copies import Copy, Role
from memcalc.estimation.items import from_phase
from memcalc.ledger.component import Component

AVERAGED_MODEL = "torch 2.13 optim/swa_utils.py, AveragedModel: a copy of the model"
FP32 = "memcalc/step/averages.py: an fp32 copy of what the optimizer updates"


def average(kind: str, weights: str, sharded_from: int) -> Iterator[Copy]:
    """Yield the averaged copy: sharded as the weights, or in fp32 and sharded as the fp32 master weights."""
    mask = from_phase("optimizer")
    if kind == "weights":
        yield Copy(
            Component.OPTIMIZER_STATE, " average", weights, sharded_from, mask, AVERAGED_MODEL, role=Role.AVERAGE
        )
    elif kind == "fp32":
        yield Copy(Component.OPTIMIZER_STATE, " average", "fp32", 1, mask, FP32, role=Role.AVERAGE)
