"""Copies of weights and gradients that a recipe keeps in addition to the model's, with their lifetimes.

Which copies exist is defined in memcalc/spec/recipes.py; this file allocates and frees them.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from memcalc.spec.recipes import RECIPES
from memcalc.spec.training import TrainingSpec
from memcalc.step.dtypes import DTYPES, compute_dtype


def autocast(training: TrainingSpec, device: torch.device) -> AbstractContextManager[object]:
    """Return the context of forward and loss."""
    if training.autocasts:
        return torch.autocast(device.type, dtype=compute_dtype(training))
    return nullcontext()


class Copies:
    """fp32 master weights and fp32 gradients of a model's parameters.

    The fp32 gradient of a master weight is its `.grad`, where the optimizer expects it.

    Args:
        parameters: parameters of the model, without duplicates.
        training: names the recipe.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], training: TrainingSpec) -> None:
        self.recipe = RECIPES[training.recipe]
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.masters: list[nn.Parameter] = []
        if self.recipe.master is not None:
            self.masters = [nn.Parameter(p.detach().to(torch.float32, copy=True)) for p in self.parameters]
        self.max_norm = training.gradient_clipping
        # Main gradients in another dtype than the master weights; these get their `.grad` in the step.
        self.summed: list[Tensor] = []
        dtype = training.gradient_dtype
        if self.recipe.main_gradients_live == "always" and dtype is not None and dtype != self.recipe.main_gradients:
            self.summed = [torch.zeros_like(p, dtype=DTYPES[dtype]) for p in self.parameters]
            for parameter, gradient in zip(self.parameters, self.summed, strict=True):
                self._sum_in_backward(parameter, gradient)
            return
        if self.recipe.main_gradients_live == "always":
            for master in self.masters:
                master.grad = torch.zeros_like(master)
        if self.recipe.main_gradients_live in ("always", "backward"):
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                self._upcast_in_backward(parameter, master)

    @property
    def optimized(self) -> list[nn.Parameter]:
        """Parameters that the optimizer updates."""
        return self.masters or self.parameters

    def optimized_as(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        """Return what the optimizer updates in place of some of the model's parameters, in the model's order."""
        wanted = {id(parameter) for parameter in parameters}
        return [own for p, own in zip(self.parameters, self.optimized, strict=True) if id(p) in wanted]

    @property
    def gradients(self) -> list[Tensor]:
        """All live gradients, in every precision."""
        return [*self.summed, *(p.grad for p in (*self.parameters, *self.masters) if p.grad is not None)]

    def _sum_in_backward(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        def add(_: Tensor) -> None:
            assert parameter.grad is not None
            gradient.add_(parameter.grad)
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]

    def _upcast_in_backward(self, parameter: nn.Parameter, master: nn.Parameter) -> None:
        transient = self.recipe.gradients is None

        def upcast(_: Tensor) -> None:
            assert parameter.grad is not None
            if master.grad is None:
                master.grad = parameter.grad.to(torch.float32, copy=True)  # kept; the first one is cleared
            else:
                master.grad.add_(parameter.grad)
            if transient:
                parameter.grad = None
            else:  # the sum is kept in fp32; the next micro-batch starts from zero
                parameter.grad.zero_()

        parameter.register_post_accumulate_grad_hook(upcast)  # type: ignore[no-untyped-call]

    def after_backward(self) -> None:
        """Free transient gradients that DDP has allocated again for reduced ones (reducer.cpp, finalize_backward)."""
        if self.recipe.gradients is None:
            for parameter in self.parameters:
                parameter.grad = None

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Run one optimizer step, including what the recipe does before and after it."""
        if self.recipe.main_gradients_live == "step":
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                master.grad = None if parameter.grad is None else parameter.grad.to(torch.float32, copy=True)
        for master, gradient in zip(self.masters, self.summed, strict=False):
            master.grad = gradient.float()
        if self.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.optimized, self.max_norm, foreach=True)  # the default on CUDA
        optimizer.step()
        if self.recipe.main_gradients_live == "step" or self.summed:
            for master in self.masters:
                master.grad = None
        if self.masters:
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                parameter.copy_(master)

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Free the gradients or zero them; persistent main gradients are always zeroed."""
        for gradient in self.summed:
            gradient.zero_()
        _clear(self.parameters, set_to_none=set_to_none)
        _clear(self.masters, set_to_none=set_to_none and self.recipe.main_gradients_live != "always")


def _clear(parameters: list[nn.Parameter], *, set_to_none: bool) -> None:
    for parameter in parameters:
        if set_to_none:
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad.zero_()
