"""Activations of transformers that are several operators (activations.py)."""

from __future__ import annotations

from collections.abc import Callable

from memcalc.operators import Operators
from memcalc.programs.tape import Tensor


def new_gelu(ops: Operators, x: Tensor) -> Tensor:
    """NewGELUActivation: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), eight operators."""
    half = ops.scale(x, "gelu x/2")
    cube = ops.scale(ops.pow(x, "gelu x^3"), "gelu 0.044715 x^3")
    inner = ops.scale(ops.add(x, cube, "gelu sum"), "gelu argument")
    return _halved(ops, x, half, inner)


def fast_gelu(ops: Operators, x: Tensor) -> Tensor:
    """FastGELUActivation: 0.5 x (1 + tanh(0.7978845608 x (1 + 0.044715 x x))), nine operators."""
    half, scaled = ops.scale(x, "gelu x/2"), ops.scale(x, "gelu sqrt(2/pi) x")
    square = ops.mul(ops.scale(x, "gelu 0.044715 x"), x, "gelu 0.044715 x²")
    inner = ops.mul(scaled, ops.shift(square, "gelu 1 + 0.044715 x²"), "gelu argument")
    return _halved(ops, x, half, inner)


def _halved(ops: Operators, x: Tensor, half: Tensor, inner: Tensor) -> Tensor:
    """Return half * (1 + tanh(inner)); the caller's variable references x until then."""
    factor = ops.shift(ops.pointwise(inner, "gelu tanh", saves="output"), "gelu 1 + tanh")
    output = ops.mul(half, factor, "gelu output")
    ops.tape.still_referenced(x)
    return output


# by the model's `gelu`; other variants are one operator
COMPOSITE: dict[str, Callable[[Operators, Tensor], Tensor]] = {"new": new_gelu, "fast": fast_gelu}
