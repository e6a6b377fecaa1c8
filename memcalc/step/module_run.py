"""The training loop, or forward alone, for a user's module, in the phases of `memcalc.step.loop`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from memcalc.errors import ENDINGS, InputError, MemcalcError
from memcalc.ledger.component import Component
from memcalc.step.loop import Observer
from memcalc.step.meta_modules import place_inputs, place_module, tensors_in
from memcalc.step.python_file import own_line

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def default_loss(output: Any) -> Tensor:
    """Return the output's `loss`, else an output of one element, else the sum of its first floating-point tensor.

    Raises:
        InputError: there is none.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    first = next((tensor for tensor in tensors_in(output) if tensor.is_floating_point()), None)
    if first is None:
        raise InputError(
            "the module's output has no floating-point tensor.", "Give loss=, a function of the output.", "loss"
        )
    return first if first.numel() == 1 else first.sum()


@dataclass(frozen=True, slots=True)
class ModuleStep:
    """The step to run."""

    module: nn.Module  # on any device, including meta; it is not changed
    inputs: Any  # of its forward: a tuple of positional arguments, a mapping of keyword arguments, or one argument
    loss: Callable[[Any], Tensor] = default_loss  # the module's output to a tensor of one element
    optimizer: OptimizerFactory | None = None  # parameters to an optimizer; None: forward and backward alone
    autocast: torch.dtype | None = None  # dtype of autocast in forward and loss; None: no autocast
    zero_grad: Literal["set_to_none", "zero"] = "set_to_none"  # how gradients are cleared before a step
    gradient_accumulation_steps: int = 1  # micro-batches per step
    # run forward alone, in this context of PyTorch, with the module in evaluation mode; None: train
    inference: Literal["inference_mode", "no_grad"] | None = None


@dataclass(frozen=True, slots=True)
class PlacedModule:
    """The module on the device."""

    module: nn.Module


class ModuleRun:
    """A few training steps of a module on one device; its current tensors can be queried at any time.

    Args:
        step: the step to run.
        device: any device that PyTorch can compute on.
    """

    engine: str | None = None  # one rank

    def __init__(self, step: ModuleStep, device: torch.device) -> None:
        self.step = step
        self.device = device
        self.model: PlacedModule | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.inputs: Any = None
        self.output: Any = None  # a script's variable references it until backward is over

    def execute(self, steps: int, observer: Observer) -> None:
        """Place everything on the device, then train, or run forward alone.

        Raises:
            InputError: there is nothing to train, no loss, or the module's own code fails.
        """
        torch.manual_seed(0)
        with observer.phase("model"):
            module = place_module(self.step.module, self.device)
            self.model = PlacedModule(module)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if self.step.optimizer is not None:
            with observer.phase("optimizer"):
                self.optimizer = self.step.optimizer(trained)
        with observer.phase("input"):
            self.inputs = place_inputs(self.step.inputs, self.device)
        if self.step.inference is not None:
            self._infer(module.eval(), steps, observer)
            return
        for step in range(1, steps + 1):
            with observer.phase(f"zero_grad_{step}"):
                self.output = None
                self._zero_grad(trained)
            for _ in range(self.step.gradient_accumulation_steps):
                self._micro_batch(module, step, observer)
            if self.optimizer is not None:
                with observer.phase(f"optimizer_step_{step}"):
                    self.output = None
                    self.optimizer.step()

    def _zero_grad(self, trained: list[nn.Parameter]) -> None:
        for parameter in trained:
            if self.step.zero_grad == "set_to_none":
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def _infer(self, module: nn.Module, steps: int, observer: Observer) -> None:
        context = torch.inference_mode if self.step.inference == "inference_mode" else torch.no_grad
        with context(), self._autocast():
            for step in range(1, steps + 1):
                with observer.phase(f"forward_{step}"):
                    self.output = None
                    self.output = self._forward(module)

    def _micro_batch(self, module: nn.Module, step: int, observer: Observer) -> None:
        with self._autocast():
            with observer.phase(f"forward_{step}"):
                self.output = None
                self.output = self._forward(module)
            with observer.phase(f"loss_{step}"):
                loss = self.step.loss(self.output)
        if not loss.requires_grad:
            raise InputError(
                "the loss depends on nothing that is trained.",
                "Let a parameter or an input require a gradient, and compute the loss from the output.",
                "module",
            )
        with observer.phase(f"backward_{step}"):
            if self.step.gradient_accumulation_steps > 1:
                loss = loss / self.step.gradient_accumulation_steps
            loss.backward()  # type: ignore[no-untyped-call]
            del loss

    def _forward(self, module: nn.Module) -> Any:
        """Return the module's output.

        Raises:
            InputError: the module's own code fails.
        """
        try:
            return _called(module, self.inputs)
        except (MemcalcError, torch.OutOfMemoryError, *ENDINGS):
            raise
        except BaseException as error:
            raise InputError(
                f"forward raises {type(error).__name__}: {error} ({own_line(error)}).",
                "Run the module once on real tensors: memcalc needs a module and inputs that work.",
                "module",
            ) from error

    def _autocast(self) -> AbstractContextManager[object]:
        dtype = self.step.autocast
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)

    def tensors_by_component(self) -> dict[Component, list[Tensor]]:
        """Return the tensors of known component, by component; activations and temporaries are unknown."""
        found: dict[Component, list[Tensor]] = {}
        if self.model is not None:
            module = self.model.module
            found[Component.WEIGHTS] = [*module.parameters(), *module.buffers()]
            found[Component.GRADIENTS] = [p.grad for p in module.parameters() if p.grad is not None]
        if self.optimizer is not None:
            states = (value for state in self.optimizer.state.values() for value in state.values())
            found[Component.OPTIMIZER_STATE] = [value for value in states if isinstance(value, Tensor)]
        found[Component.INPUTS] = tensors_in(self.inputs)
        if self.step.inference is not None:  # in training, outputs that outlive forward are saved for backward
            found[Component.LOGITS_AND_LOSS] = tensors_in(self.output)
        # Adam counts its steps in CPU tensors, which use no GPU memory.
        return {
            component: [tensor for tensor in tensors if tensor.device.type == self.device.type]
            for component, tensors in found.items()
        }


def _called(module: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, tuple):
        return module(*inputs)
    return module(**inputs) if isinstance(inputs, Mapping) else module(inputs)
