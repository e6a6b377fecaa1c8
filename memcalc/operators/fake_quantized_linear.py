"""Linear layers as torchao's FakeQuantizedLinear: matmuls of tensors that are quantized and dequantized at each use.

Quantization-aware training computes with values that a quantized model could store, in tensors of the original dtype.
The weight and each input go through operators that autograd records, so backward needs, for every layer, their
rounded values in fp32 and the results, which the matmul saves instead of the input and the weight.

Source: torchao 0.13 quantization/qat/linear.py, FakeQuantizedLinear; qat/fake_quantizer.py, IntxFakeQuantizer;
quantization/quant_primitives.py, _do_fake_quantize_affine. Until torchao 0.11 one autograd function saved a mask of a
byte per element instead of the fp32 values.
"""

from __future__ import annotations

from typing import NamedTuple, Unpack

from memcalc.operators.elementwise import Elementwise
from memcalc.operators.float8 import Float8Linear
from memcalc.operators.linear import LinearOptions
from memcalc.programs import operator_workspaces
from memcalc.programs.tape import (
    ALIAS,
    CAST,
    NEW,
    SAME,
    BackwardMemory,
    ForwardMemory,
    Node,
    Shape,
    Tensor,
)
from memcalc.workspaces import ceil_div

SOURCE = "torchao 0.13 quantization/quant_primitives.py: _do_fake_quantize_affine"


class FakeQuantization(NamedTuple):
    """Options of fake-quantized linear layers.

    Args:
        group_size: elements along a row of a weight that share a scale.
        layers: names of the layers that are replaced, by the last part of their names.
        chunked: names of those that run several times in a pass, each time with other scales.
    """

    group_size: int
    layers: frozenset[str]
    chunked: frozenset[str] = frozenset()

    def replaces(self, module: str, *, tied: bool = False) -> bool:
        """Return whether a linear layer is fake-quantized; an LM head without a weight of its own is not."""
        return module.rpartition(".")[2] in self.layers and not tied


class FakeQuantizedLinear(Float8Linear, Elementwise):
    """Linear layers that torchao's quantizers for quantization-aware training replace; the others are nn.Linear."""

    def linear(
        self, x: Tensor, module: str, weight: Shape, out: Shape, *, bias: bool, **options: Unpack[LinearOptions]
    ) -> Tensor:
        """See `Linear.linear`."""
        choice = self.fake_quantization
        if choice is None or not choice.replaces(module, tied=options.get("tied", False)):
            return super().linear(x, module, weight, out, bias=bias, **options)
        y = super().linear(self._fake_quantized_input(x, module), module, weight, out, bias=bias, **options)
        self.tape.still_referenced(x)  # the argument of the module's call
        return y

    def _fake_quantized_input(self, x: Tensor, module: str) -> Tensor:
        """Quantize and dequantize an input, with a scale for each token."""
        name = f"{module} input"
        x = self.viewed(x, x.shape, f"{name}, by token")
        saved = self._saved_scales(module, name, x.shape[:-1], 1)
        scaled = self.tape.new(f"{name} / scale", x.shape, "fp32", SOURCE)
        self.tape.record(
            Node(
                f"{name} / scale",
                (x,),
                (scaled,),
                saved,
                (NEW if x.dtype == "fp32" else CAST,),
                forward=ForwardMemory(also=saved, first=saved),
            )
        )
        return self._rounded_and_scaled(scaled, name, x.dtype)

    def weight_operand(self, module: str, weight: Shape, *, tied: bool) -> Tensor | None:
        """Quantize and dequantize a weight; backward casts its gradient to the weight's dtype."""
        choice = self.fake_quantization
        if choice is None or not choice.replaces(module, tied=tied):
            return super().weight_operand(module, weight, tied=tied)
        tape, name, dtype = self.tape, f"{module}.weight", self.parameters
        saved = self._saved_scales(module, name, weight, choice.group_size)
        scaled = tape.new(f"{name} / scale", weight, "fp32", SOURCE)
        gradients: tuple[int, ...] = ()
        backward = BackwardMemory()
        if self.trains(module):
            gradients = (self.parameter_gradient(module, "weight", weight, dtype),)
        if gradients and dtype != "fp32":
            wide = tape.store(f"{name} gradient in fp32", weight, "fp32", SOURCE)
            backward = BackwardMemory(
                between=((wide, 1),), summed=gradients, summed_later=((gradients[0], 1), (wide, -1))
            )
        tape.record(
            Node(
                f"{name} / scale",
                (),
                (scaled,),
                saved,
                (),
                forward=ForwardMemory(also=saved, first=saved),
                backward=backward,
                parameters=gradients,
                module=module,
            )
        )
        return self._rounded_and_scaled(scaled, name, dtype)

    def _rounded_and_scaled(self, scaled: Tensor, name: str, dtype: str) -> Tensor:
        """Round scaled values to integers in fp32, and scale them back to the given dtype."""
        tape = self.tape
        rounded = tape.new(f"{name}, rounded", scaled.shape, "fp32", SOURCE)
        tape.record(Node(f"{name}, rounded", (scaled,), (rounded,), (), (SAME,)))
        shifted = self.shift(rounded, f"{name}, rounded, with zero point")
        quantized = self._clamped(shifted, f"{name}, quantized")
        narrow = (
            self.copy(quantized, f"{name}, quantized in fp32 again")
            if dtype == "fp32"
            else self.cast(quantized, dtype, f"{name}, quantized in {dtype}")
        )
        centered = self.shift(narrow, f"{name}, without zero point")
        wide = tape.new(f"{name}, dequantized in fp32", scaled.shape, "fp32", SOURCE)
        tape.record(Node(f"{name}, dequantized", (centered,), (wide,), (), (NEW if dtype == "fp32" else CAST,)))
        y = Tensor(wide.storage, wide.shape, "fp32")
        tape.record(Node(f"{name}, dequantized, as given", (wide,), (y,), (), (ALIAS,)))
        y = self.cast(y, dtype, f"{name}, dequantized in {dtype}")
        tape.still_referenced(quantized, wide)
        return y

    def _clamped(self, x: Tensor, name: str) -> Tensor:
        """Clamp to the integers of the quantized dtype; saves x. Backward compares it with both bounds."""
        tape, source = self.tape, "torch 2.13 torch/csrc/autograd/FunctionsManual.cpp: clamp_backward"
        y = tape.new(name, x.shape, x.dtype, SOURCE)
        made = (
            tape.store(f"{name}: a zero", (), x.dtype, source),
            *(tape.store(f"{name}: elements {which}", x.shape, "bool", source) for which in ("above", "below")),
        )
        prepares = tuple((index, 1) for index in made)
        tape.record(Node(name, (x,), (y,), (x.storage,), (NEW,), backward=BackwardMemory(prepares=prepares)))
        return y

    def _saved_scales(self, module: str, name: str, shape: Shape, block_size: int) -> tuple[int, ...]:
        """Add storages for the scales that gradients need: 1 / scale, and the scale itself.

        The module keeps its last scale (states/fake_quantization.py), so only a layer that runs on several chunks has
        further ones.
        """
        assert self.fake_quantization is not None
        repeats = module.rpartition(".")[2] in self.fake_quantization.chunked
        rule = operator_workspaces.named(scales, shape=shape, block_size=block_size)
        names = ("reciprocal scales", *(("scales",) if repeats else ()))
        return tuple(self.tape.store(f"{name} {each}", (), "uint8", SOURCE, rule=rule) for each in names)


def scales(values: operator_workspaces.Values, shape: Shape, block_size: int) -> int:
    """4·(n/block): one fp32 scale for each block"""
    return 4 * ceil_div(operator_workspaces.product(values, shape), block_size)
