"""Apertus: xIELU, an activation with two parameters, as PyTorch operators."""

from __future__ import annotations

from memcalc.architectures.huggingface.llama import Llama
from memcalc.programs.tape import Tensor


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
        least = ops.pointwise(x, f"{name}: min(x, eps)")
        grown = ops.pointwise(least, f"{name}: expm1", saves="output")
        difference = ops.subtract(grown, x, f"{name}: expm1 - x")
        bent = ops.times_parameter(difference, f"{prefix}act_fn.alpha_n", "1", f"{name}: alpha (expm1 - x)")
        below = ops.add(bent, ops.scale(x, f"{name}: beta x again"), f"{name}: below 0")
        return ops.chosen(positive, above, below, name)
