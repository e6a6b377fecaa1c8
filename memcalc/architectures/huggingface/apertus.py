"""Apertus: xIELU, an activation with two parameters, as PyTorch operators."""

from __future__ import annotations

from memcalc.architectures.huggingface.llama import Llama
from memcalc.operators.base import DERIVATIVES
from memcalc.programs.tape import NEW, BackwardMemory, Node, Tensor


class Apertus(Llama):
    """ApertusDecoderLayer."""

    activation_is_module = False  # it has parameters
    norms_heads = "together"

    def act(self, x: Tensor, prefix: str) -> Tensor:
        """XIELUActivation._xielu_python: where(x > 0, a x x + b x, (expm1(min(x, eps)) - x) c + b x)."""
        ops, name = self.ops, f"{prefix}xielu"
        positive = ops.table(f"{name}: x > 0", x.shape, "bool", of=(x,))
        curved = ops.times_parameter(x, f"{prefix}act_fn.alpha_p", "1", f"{name}: alpha x")
        square = ops.mul(curved, x, f"{name}: alpha x x")
        above = ops.add(square, ops.scale(x, f"{name}: beta x"), f"{name}: above 0")
        least = self.least(x, f"{name}: min(x, eps)")
        # expm1 is on autocast's fp32 list
        grown = self.grown(ops.cast(least, "fp32") if ops.autocast else least, f"{name}: expm1")
        ops.tape.still_referenced(least)  # the caller's argument
        difference = ops.subtract(grown, x, f"{name}: expm1 - x")
        bent_name = f"{name}: alpha (expm1 - x)"
        bent = ops.times_parameter(difference, f"{prefix}act_fn.alpha_n", "1", bent_name, second=True)
        below = ops.add(bent, ops.scale(x, f"{name}: beta x again"), f"{name}: below 0")
        y = ops.chosen(positive, above, below, name)
        ops.tape.still_referenced(x)  # the module's argument
        return y

    def least(self, x: Tensor, name: str) -> Tensor:
        """torch.min(x, eps); backward: where(x == eps, g / 2, g).masked_fill_(x > eps, 0), of derivatives.yaml."""
        tape = self.tape
        y = tape.new(name, x.shape, x.dtype, DERIVATIVES)
        half = tape.store(f"{name}: half the gradient", x.shape, x.dtype, DERIVATIVES)
        equal, above = (tape.store(f"{name}: {what}", x.shape, "bool", DERIVATIVES) for what in ("equal", "above"))
        backward = BackwardMemory(
            prepares=((half, 1), (equal, 1)), between=((above, 1), (above, -1), (equal, -1), (half, -1))
        )
        tape.record(Node(name, (x,), (y,), (x.storage,), (NEW,), backward=backward, variables=(x,)))
        return y

    def grown(self, x: Tensor, name: str) -> Tensor:
        """torch.expm1, which saves its result; backward multiplies the gradient by 1 more than it."""
        tape = self.tape
        y = tape.new(name, x.shape, x.dtype, DERIVATIVES)
        factor = tape.store(f"{name} + 1", x.shape, x.dtype, DERIVATIVES)
        backward = BackwardMemory(prepares=((factor, 1),), between=((factor, -1),))
        tape.record(Node(name, (x,), (y,), (y.storage,), (NEW,), backward=backward, variables=(y,)))
        return y
