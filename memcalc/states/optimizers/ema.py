"""Exponential moving average of the weights (`training.ema`): a further copy, created with the optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.ledger.component import Component
from memcalc.ledger.row_drafts import from_phase
from memcalc.states.parameter_copies import ParameterCopy, Role

AVERAGED_MODEL = "torch 2.13 optim/swa_utils.py, AveragedModel: a copy of the model"
FP32 = "memcalc/step/ema.py: an fp32 copy of what the optimizer updates"


def average(average_type: str, weights: str, sharded_from: int) -> Iterator[ParameterCopy]:
    """Yield the averaged copy: sharded as the weights, or in fp32 and sharded as the fp32 master weights."""
    mask = from_phase("optimizer")
    if average_type == "weights":
        yield ParameterCopy(
            Component.OPTIMIZER_STATE, " average", weights, sharded_from, mask, AVERAGED_MODEL, role=Role.AVERAGE
        )
    elif average_type == "fp32":
        yield ParameterCopy(Component.OPTIMIZER_STATE, " average", "fp32", 1, mask, FP32, role=Role.AVERAGE)
