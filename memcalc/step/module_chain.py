"""Sequential modules, each run separately, to measure what a recomputation plan needs to know of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from memcalc.errors import InputError
from memcalc.ledger.component import Component
from memcalc.spec.recompute_plan import Segment
from memcalc.step.loop import Observer
from memcalc.step.meta_modules import place_inputs, place_module
from memcalc.step.module_run import OptimizerFactory, PlacedModule
from memcalc.step.recompute import run_plan

# Passes of each module, in this order; phases are named "PASS NUMBER".
WARM, FORWARD, BACKWARD, BARE, AGAIN, OPTIMIZER = "warm", "forward", "backward", "bare", "again", "optimizer"


class ModuleSizes(NamedTuple):
    """Sizes of a module that do not depend on the point in the step."""

    input_bytes: int  # bytes of its input tensor
    output_bytes: int  # bytes of its output tensor
    left_bytes: tuple[int, ...]  # bytes of each parameter's gradient
    flops: int  # FLOPs of its forward's matmuls


class _End(torch.autograd.Function):
    """Stand-in for the modules after a block: reads the output in forward, and returns a new gradient in backward."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.like = y.shape, y.dtype, y.device
        return torch.empty((), dtype=y.dtype, device=y.device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Tensor:
        shape, dtype, device = ctx.like
        return torch.empty(shape, dtype=dtype, device=device)


def _end(y: Tensor) -> Tensor:
    loss: Tensor = _End.apply(y)  # type: ignore[no-untyped-call]
    return loss


class ChainRun:
    """Forward and backward of each module, with saved activations and checkpointed; then optimizer steps.

    Args:
        modules: in order, each from one tensor to one tensor.
        given: input of the first module.
        optimizer: parameters to an optimizer, or None.
        device: any device that PyTorch can compute on.
    """

    engine: str | None = None  # one rank
    optimizer: torch.optim.Optimizer | None = None  # each module's optimizer, in turn

    def __init__(
        self, modules: Sequence[nn.Module], given: Tensor, optimizer: OptimizerFactory | None, device: torch.device
    ) -> None:
        self.modules = modules
        self.given = given
        self.factory = optimizer
        self.device = device
        self.model: PlacedModule | None = None
        self.ends: list[ModuleSizes] = []

    def execute(self, steps: int, observer: Observer) -> None:  # noqa: ARG002 -- the signature of all runs
        """Place the modules on the device, and run them one at a time.

        Raises:
            InputError: a module does not return a single tensor, or its output has no gradient.
        """
        torch.manual_seed(0)
        with observer.phase("model"):
            placed = place_module(nn.Sequential(*self.modules), self.device)
            self.model = PlacedModule(placed)
        blocks = list(placed.children())
        with observer.phase("input"):
            x = place_inputs(self.given, self.device)
        sources = self._outputs(blocks, x, observer)
        for number, (block, shape) in enumerate(zip(blocks, sources, strict=True)):
            self._measure(number, block, shape, observer)
        if self.factory is not None:
            trained = [parameter for parameter in placed.parameters() if parameter.requires_grad]
            for parameter in trained:
                parameter.grad = torch.empty_like(parameter)
            made = self.factory(trained)
            for _ in range(2):  # the second step finds the states allocated
                with observer.phase(OPTIMIZER):
                    made.step()

    def _outputs(self, blocks: list[nn.Module], x: Tensor, observer: Observer) -> list[Tensor]:
        """Return each block's input. Every block runs once, so that persistent library workspaces are allocated."""
        given = []
        for number, block in enumerate(blocks):
            given.append(torch.empty_like(x, device="meta"))
            with observer.phase(f"{WARM} {number}"):
                start = self._source(number, given[-1])
                y = block(start)
                if not isinstance(y, Tensor) or not y.requires_grad:
                    made = "a tensor without gradient" if isinstance(y, Tensor) else type(y).__name__
                    raise InputError(
                        f"block {number} makes {made}.",
                        "Each module of a chain maps one tensor to one tensor, and trains or passes a gradient on.",
                        f"modules[{number}]",
                    )
                torch.autograd.grad(_end(y), self._wanted(block, start), allow_unused=True)
                x = y.detach()
                del y, start
        return given

    def _source(self, number: int, shape: Tensor) -> Tensor:
        """Return a block's input, referenced by its readers only; the first block's is data, without gradient."""
        if number == 0 or not shape.is_floating_point():
            return torch.empty_like(shape, device=self.device)
        leaf = torch.empty(1, dtype=shape.dtype, device=self.device, requires_grad=True)
        return leaf.expand(shape.shape).contiguous()

    @staticmethod
    def _wanted(block: nn.Module, start: Tensor) -> list[Tensor]:
        inputs = [start] if start.requires_grad else []
        return [*inputs, *(parameter for parameter in block.parameters() if parameter.requires_grad)]

    def _measure(self, number: int, block: nn.Module, shape: Tensor, observer: Observer) -> None:
        x = self._source(number, shape)
        with observer.phase(f"{FORWARD} {number}"):
            y = block(x)
        size = y.numel() * y.element_size()
        with observer.phase(f"{BACKWARD} {number}"):
            loss = _end(y)
            del y  # the following blocks are done with it
            gradients = torch.autograd.grad(loss, self._wanted(block, x), allow_unused=True)
            del loss
        made = [gradient for gradient in gradients[int(x.requires_grad) :] if gradient is not None]
        left = tuple(gradient.numel() * gradient.element_size() for gradient in made)
        del gradients, made
        with observer.phase(f"{BARE} {number}"):
            y = checkpoint(block, x, use_reentrant=False)
        with observer.phase(f"{AGAIN} {number}"):
            loss = _end(y)
            del y
            gradients = torch.autograd.grad(loss, self._wanted(block, x), allow_unused=True)
            del loss, gradients
        with observer.phase("count"), torch.no_grad(), FlopCounterMode(display=False) as counter:
            block(x)
        self.ends.append(ModuleSizes(x.numel() * x.element_size(), size, left, counter.get_total_flops()))
        del x

    def tensors_by_component(self) -> dict[Component, list[Tensor]]:
        """Return {}: no components are known, because only totals are read."""
        return {}


class PlannedModules(nn.Module):
    """Sequential modules run by a recomputation plan of `memcalc.recomputation`.

    Args:
        modules: in order.
        items: the plan: a number saves its module's activations, a tuple is recomputed as a nested plan.
    """

    def __init__(self, modules: Sequence[nn.Module], items: Segment) -> None:
        super().__init__()
        self.steps = nn.ModuleList(modules)
        self.items = items

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the last module."""
        return run_plan(self.items, x, lambda number, x: self.steps[number](x))
