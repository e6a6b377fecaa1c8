"""A moving average of the weights: torch's AveragedModel, or a list in fp32."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from memcalc.spec.training import TrainingSpec

DECAY = 0.999


class Average(Protocol):
    """A copy of the weights that follows them."""

    @property
    def tensors(self) -> list[Tensor]:
        """What it holds."""

    def update(self) -> None:
        """Move it a little towards the weights."""


def build_average(training: TrainingSpec, module: nn.Module, optimized: list[nn.Parameter]) -> Average | None:
    """The average that the spec asks for, if it does."""
    if training.ema == "none":
        return None
    return Averaged(module) if training.ema == "weights" else AveragedInFp32(optimized)


class Averaged:
    """A copy of the model, in its dtype."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.model = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(DECAY))  # type: ignore[no-untyped-call]

    @property
    def tensors(self) -> list[Tensor]:
        """See `Average`."""
        return [*self.model.parameters(), *self.model.buffers()]

    def update(self) -> None:
        """See `Average`."""
        self.model.update_parameters(self.module)


class AveragedInFp32:
    """An fp32 copy of what the optimizer updates. What is not in fp32 itself is cast, one parameter after the other."""

    def __init__(self, optimized: list[nn.Parameter]) -> None:
        self.optimized = optimized
        self.tensors = [parameter.detach().to(torch.float32, copy=True) for parameter in optimized]

    @torch.no_grad()
    def update(self) -> None:
        """See `Average`."""
        if self.optimized[0].dtype == torch.float32:
            torch._foreach_lerp_(self.tensors, list(self.optimized), 1 - DECAY)
            return
        for average, parameter in zip(self.tensors, self.optimized, strict=True):
            average.lerp_(parameter.float(), 1 - DECAY)
