"""The optimizers by their names in the spec. Learning rates are of no consequence: only sizes are measured."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable

import torch
from torch import nn

from memcalc.errors import InputError, Unavailable
from memcalc.spec.training import OptimizerImplementation, TrainingSpec
from memcalc.step.lion import Lion

LEARNING_RATE = 1e-5

# PyTorch's switches for the three ways to run one update.
SWITCHES: dict[OptimizerImplementation, dict[str, bool]] = {
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "for-loop": {"foreach": False},
}


def build_optimizer(training: TrainingSpec, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that the spec names, over these parameters; it makes its states at the first step.

    Raises:
        InputError: the optimizer has no such implementation.
        Unavailable: its package is not installed.
    """
    name, switches = training.optimizer, SWITCHES[training.optimizer_implementation]
    if name == "adam-8bit":
        return _eight_bit(parameters)
    if name in ("lion", "adafactor"):
        if training.optimizer_implementation == "fused":
            raise InputError(
                f"optimizer = {name} has no fused implementation.",
                "Set optimizer_implementation: foreach or for-loop.",
                "training.optimizer_implementation",
            )
        factory: Callable[..., torch.optim.Optimizer] = Lion if name == "lion" else torch.optim.Adafactor
        return factory(parameters, lr=LEARNING_RATE, **switches)
    if name in ("sgd", "momentum"):
        momentum = 0.9 if name == "momentum" else 0.0
        return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=momentum, **switches)
    adam: Callable[..., torch.optim.Optimizer] = torch.optim.Adam if name == "adam" else torch.optim.AdamW
    return adam(parameters, lr=LEARNING_RATE, **switches)


def _eight_bit(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise Unavailable("optimizer = adam-8bit runs bitsandbytes' Adam8bit: pip install bitsandbytes")
    factory: Callable[..., torch.optim.Optimizer] = importlib.import_module("bitsandbytes").optim.Adam8bit
    return factory(parameters, lr=LEARNING_RATE)
