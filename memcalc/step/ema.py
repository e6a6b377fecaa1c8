"""Exponential moving average of the weights: torch's AveragedModel, or a list in fp32."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from memcalc.spec.training import TrainingSpec

DECAY = 0.999


def build_average(training: TrainingSpec, module: nn.Module, optimized: list[nn.Parameter]) -> Average | None:
    """Return the moving average that the spec requests; None if it requests none."""
    if training.ema == "none":
        return None
    return Averaged(module) if training.ema == "weights" else AveragedInFp32(optimized)


class Averaged:
    """Average in the dtype of the model."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.model = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(DECAY))  # type: ignore[no-untyped-call]

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors of the average."""
        return [*self.model.parameters(), *self.model.buffers()]

    def update(self) -> None:
        """Move the average towards the current weights."""
        self.model.update_parameters(self.module)


class AveragedInFp32:
    """fp32 average of the optimizer's parameters. Parameters in another dtype are cast one at a time."""

    def __init__(self, optimized: list[nn.Parameter]) -> None:
        self.optimized = optimized
        self.tensors = [parameter.detach().to(torch.float32, copy=True) for parameter in optimized]

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the current weights."""
        if self.optimized[0].dtype == torch.float32:
            torch._foreach_lerp_(self.tensors, list(self.optimized), 1 - DECAY)
            return
        for average, parameter in zip(self.tensors, self.optimized, strict=True):
            average.lerp_(parameter.float(), 1 - DECAY)


Average = Averaged | AveragedInFp32
