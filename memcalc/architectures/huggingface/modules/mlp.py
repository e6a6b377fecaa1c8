"""Dense MLPs of transformers' families."""

from __future__ import annotations

from collections.abc import Callable

from memcalc.architectures.huggingface.family import Family
from memcalc.operators import Operators
from memcalc.operators.fused_lora import AdaptedLayer
from memcalc.programs.tape import Tensor


class Mlps(Family):
    """Dense MLPs by config: gated or not, gate and up in one linear layer or two."""

    def mlp(self, x: Tensor) -> Tensor:
        """The layer's dense MLP."""
        return self.dense(x, "mlp.", self.c.mlp.width)

    def dense(self, x: Tensor, prefix: str, inner: str) -> Tensor:
        """An MLP with any intermediate size; `prefix` is that of its linear layers' names."""
        if not self.c.mlp.gated:
            return self.ungated(x, prefix, inner)
        return self.gated_of_one(x, prefix, inner) if self.c.mlp.fused_gate_up else self.gated(x, prefix, inner)

    def gated(self, x: Tensor, prefix: str, inner: str) -> Tensor:
        """LlamaMLP: down(silu(gate(x)) * up(x))."""
        c, ops = self.c, self.ops
        if ops.fuses("mlp"):
            wide = (inner, "d"), ("b", "s", inner)
            of_gate, of_up = (AdaptedLayer(f"{prefix}{name}", *wide) for name in ("gate_proj", "up_proj"))
            of_down = AdaptedLayer(f"{prefix}down_proj", ("d", inner), ("b", "s", "d"))
            return ops.fused_mlp(x, prefix.rstrip("."), (of_gate, of_up, of_down))
        gate = ops.linear(x, f"{prefix}gate_proj", (inner, "d"), ("b", "s", inner), bias=c.mlp.bias)
        kind = f"{prefix}{self.activation}"
        gate = gate if c.liger else self.act(gate, prefix)
        up = ops.linear(x, f"{prefix}up_proj", (inner, "d"), ("b", "s", inner), bias=c.mlp.bias)
        multiplied = ops.liger_swiglu if c.liger else ops.mul
        product = multiplied(gate, up, f"{kind}(gate) * up")
        return ops.linear(product, f"{prefix}down_proj", ("d", inner), ("b", "s", "d"), bias=c.mlp.bias)

    def gated_of_one(self, x: Tensor, prefix: str, inner: str) -> Tensor:
        """Phi3MLP: gate and up are the halves of one linear layer's output."""
        c, ops = self.c, self.ops
        both = ("b", "s", f"2·{inner}")
        joined = ops.linear(x, f"{prefix}gate_up_proj", (both[-1], "d"), both, bias=c.mlp.bias)
        gate, up = ops.split(joined, (("b", "s", inner), ("b", "s", inner)), f"{prefix}gate, up")
        kind = f"{prefix}{self.activation}"
        product = ops.mul(up, self.act(gate, prefix), f"up * {kind}(gate)")
        self.tape.still_referenced(gate, up)
        down = ops.linear(product, f"{prefix}down_proj", ("d", inner), ("b", "s", "d"), bias=c.mlp.bias)
        self.tape.still_referenced(gate, product)  # variables gate and up_states
        return down

    def ungated(self, x: Tensor, prefix: str, inner: str) -> Tensor:
        """ArceeMLP: down(act(up(x)))."""
        c, ops = self.c, self.ops
        up = ops.linear(x, f"{prefix}up_proj", (inner, "d"), ("b", "s", inner), bias=c.mlp.bias)
        return ops.linear(self.act(up, prefix), f"{prefix}down_proj", ("d", inner), ("b", "s", "d"), bias=c.mlp.bias)

    def act(self, x: Tensor, prefix: str) -> Tensor:
        """The activation: one operator, unless the config has a composite gelu or relu squared (activations.py)."""
        c, ops, kind = self.c, self.ops, self.activation
        if kind == "gelu" and c.mlp.gelu in COMPOSITE:
            return COMPOSITE[c.mlp.gelu](ops, x)
        y = ops.pointwise(x, f"{prefix}{kind}", saves="output" if kind == "relu" else "input")
        if c.mlp.activation == "relu2":
            y = ops.pow(y, f"{prefix}relu²")
            self.tape.still_referenced(x)
        return y

    @property
    def activation(self) -> str:
        """The name of the activation in rows."""
        return {"swiglu": "silu", "geglu": "gelu", "relu2": "relu"}.get(self.c.mlp.activation, self.c.mlp.activation)


# Activations of transformers that are several operators (activations.py).


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
