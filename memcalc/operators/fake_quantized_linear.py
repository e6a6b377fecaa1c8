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
    REDUCED,
    SAME,
    SUMMED,
    BackwardMemory,
    ForwardMemory,
    Node,
    Shape,
    Tensor,
)
from memcalc.workspaces import ceil_div

SOURCE = "torchao 0.13 quantization/quant_primitives.py: _do_fake_quantize_affine"
BY_RANGE = "torchao 0.17 quantization/qat/fake_quantizer.py: Int4WeightFakeQuantizer"


class FakeQuantization(NamedTuple):
    """Options of fake-quantized linear layers."""

    group_size: int  # elements along a row of a weight that share a scale
    layers: frozenset[str]  # names of the layers that are replaced, by the last part of their names
    # names of those that run several times in a pass, each time with other scales
    chunked: frozenset[str] = frozenset()
    # whether a group's scale is that of its least and largest value, with gradients (axolotl), or of the largest
    # absolute value, without
    by_range: bool = False

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
        tokens = min(x.shape[:-1], out[:-1], key=len)  # input or output may be split into heads
        rounded = self._fake_quantized_input(x, module, tokens)
        y = super().linear(rounded, module, weight, out, bias=bias, **options)
        self.tape.still_referenced(x)  # the argument of the module's call
        return y

    def _fake_quantized_input(self, x: Tensor, module: str, tokens: Shape) -> Tensor:
        """Quantize and dequantize an input, with a scale for each token; `tokens`: their axes."""
        name = f"{module} input"
        x = self.viewed(x, x.shape, f"{name}, by token")
        saved = self._saved_scales(module, name, tokens, 1)
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
        """Quantize and dequantize a weight."""
        choice = self.fake_quantization
        if choice is None or not choice.replaces(module, tied=tied):
            return super().weight_operand(module, weight, tied=tied)
        if choice.by_range:
            return self._scaled_by_range(module, weight)
        return self._scaled_symmetrically(module, weight, choice.group_size)

    def _scaled_symmetrically(self, module: str, weight: Shape, group_size: int) -> Tensor:
        """Round a weight in groups with scales without gradients; backward casts its gradient to the weight's dtype."""
        tape, name, dtype = self.tape, f"{module}.weight", self.parameters
        saved = self._saved_scales(module, name, weight, group_size)
        scaled = tape.new(f"{name} / scale", weight, "fp32", SOURCE)
        gradients = self._weight_gradients(module, weight)
        backward = BackwardMemory()
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

    def _weight_gradients(self, module: str, weight: Shape) -> tuple[int, ...]:
        """Return the gradient of a layer's weight; none if it is frozen."""
        return (self.parameter_gradient(module, "weight", weight, self.parameters),) if self.trains(module) else ()

    def _scaled_by_range(self, module: str, weight: Shape) -> Tensor:
        """Round a weight in groups between their least and largest values, through which gradients flow, too.

        All operators run in fp32. torchao 0.17 quantization/qat/fake_quantizer.py, Int4WeightFakeQuantizer.
        """
        tape, name = self.tape, f"{module}.weight"
        groups = (*weight[:-1], f"{weight[-1]}/g")
        wide = tape.new(f"{name} in fp32", weight, "fp32", BY_RANGE)
        gradients = self._weight_gradients(module, weight)
        tape.record(Node(f"{name} in fp32", (), (wide,), (), (), parameters=gradients, module=module))
        grouped = self.viewed(wide, weight, f"{name} in groups")
        largest = self._extreme(grouped, f"{name}, largest of groups", groups)
        least = self._extreme(grouped, f"{name}, least of groups", groups)
        span = self._clamped(self.subtract(largest, least, f"{name}, ranges"), f"{name}, ranges above 0", masks=1)
        scale = self.scale(span, f"{name}, scales")
        zero = self.add(least, self.scale(scale, f"{name}, half ranges"), f"{name}, zero points")
        shifted = self.minus_rows(grouped, least, f"{name} above the least")
        quotients = self._divided_by_rows(shifted, scale, f"{name} / scale")
        rounded = tape.new(f"{name}, rounded", weight, "fp32", BY_RANGE)
        tape.record(Node(f"{name}, rounded", (quotients,), (rounded,), (), (SAME,)))
        centered = self.shift(self._clamped(rounded, f"{name}, quantized"), f"{name}, centered")
        product = self.mul(centered, scale, f"{name}, scaled", reduces=True)
        total = tape.new(f"{name}, dequantized in fp32", weight, "fp32", BY_RANGE)
        tape.record(Node(f"{name}, dequantized", (product, zero), (total,), (), (SAME, SUMMED)))
        y = self.cast(
            self.viewed(total, weight, f"{name}, dequantized, as given"), self.parameters, f"{name}, dequantized"
        )
        tape.still_referenced(grouped, largest, least, scale, zero, total)
        return y

    def _extreme(self, x: Tensor, name: str, groups: Shape) -> Tensor:
        """The least or largest value of each group; saves x and itself. Backward spreads it over the equal values."""
        tape, source = self.tape, "torch 2.13 torch/csrc/autograd/FunctionsManual.cpp: scale_grad_by_count"
        y = tape.new(name, groups, x.dtype, BY_RANGE)
        made = (
            tape.store(f"{name}: equal values", x.shape, "bool", source),
            tape.store(f"{name}: their number", groups, "int64", source),
            tape.store(f"{name}: gradient for each", groups, x.dtype, source),
        )
        prepares = tuple((index, 1) for index in made)
        saved = (x.storage, y.storage)
        tape.record(Node(name, (x,), (y,), saved, (NEW,), backward=BackwardMemory(prepares=prepares)))
        return y

    def _divided_by_rows(self, x: Tensor, rows: Tensor, name: str) -> Tensor:
        """x divided by one number per group; saves both. The numbers' gradient is -gradient * (x / rows / rows).

        Each factor is a tensor as large as x (torch 2.13 FunctionsManual.cpp, div_tensor_other_grad).
        """
        tape = self.tape
        y = tape.new(name, x.shape, x.dtype, BY_RANGE)
        factors = [
            tape.store(f"{name}: {which}", x.shape, x.dtype, "torch 2.13 FunctionsManual.cpp: div_tensor_other_grad")
            for which in ("quotient", "quotient divided again", "negative gradient")
        ]
        backward = BackwardMemory(prepares=tuple((index, 1) for index in factors), frees_early=tuple(factors))
        saved = (x.storage, rows.storage)
        tape.record(Node(name, (rows, x), (y,), saved, (REDUCED, NEW), backward=backward))
        return y

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

    def _clamped(self, x: Tensor, name: str, *, masks: int = 2) -> Tensor:
        """Clamp between one or two bounds; saves x. Backward compares it with each: a mask of a byte per element."""
        tape, source = self.tape, "torch 2.13 torch/csrc/autograd/FunctionsManual.cpp: clamp_backward"
        y = tape.new(name, x.shape, x.dtype, SOURCE)
        made = (
            tape.store(f"{name}: a zero", (), x.dtype, source),
            *(tape.store(f"{name}: elements {which}", x.shape, "bool", source) for which in ("above", "below")[:masks]),
        )
        prepares = tuple((index, 1) for index in made)
        tape.record(Node(name, (x,), (y,), (x.storage,), (NEW,), backward=BackwardMemory(prepares=prepares)))
        return y

    def _saved_scales(self, module: str, name: str, shape: Shape, block_size: int) -> tuple[int, ...]:
        """Add storages for the scales that gradients need: 1 / scale, and the scale itself.

        The module keeps its last scale (states/persistent.py), so only a layer that runs on several chunks has
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
