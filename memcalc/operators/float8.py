"""Linear layers as torchao's Float8Linear: FP8 matmuls of casts that are created for each matmul.

Source: torchao 0.18 float8/float8_linear.py (matmul_with_hp_or_float8_args). No cast outlives its matmul: autograd
saves input and weight as given, so activations do not get smaller. A cast goes through fp32, scaled and clamped, with a
peak of nine bytes per element (float8_training_tensor.py, _ToFloat8ConstrFunc). This is eager execution; torch.compile
fuses it.
"""

from __future__ import annotations

from typing import NamedTuple, Unpack

from memcalc.operators.linear import Linear, LinearOptions
from memcalc.programs.tape import VIEW, BackwardMemory, ForwardMemory, Node, Shape, Tensor

SOURCE = "torchao 0.18 float8/float8_linear.py"
CAST = "torchao 0.18 float8/float8_training_tensor.py: _ToFloat8ConstrFunc"
PRODUCT = "torchao 0.18 float8/float8_ops.py"


class Float8(NamedTuple):
    """Options of torchao's FP8 linear layers."""

    recipe: str  # "tensorwise", "rowwise", or "rowwise-gw-hp", which computes weight gradients in bf16 or fp16
    skip: tuple[str, ...]  # parts of the names of the layers that are not converted
    gathered: bool  # whether the weights are already in FP8 (FSDP2's float8 all-gather)

    def converts(self, module: str) -> bool:
        """Return whether a linear layer is converted by torchao."""
        return not any(part in module for part in self.skip)


class Float8Linear(Linear):
    """Linear layers that torchao replaces; the others are nn.Linear."""

    def linear(
        self, x: Tensor, module: str, weight: Shape, out: Shape, *, bias: bool, **options: Unpack[LinearOptions]
    ) -> Tensor:
        """See `Linear.linear`. transformers' Conv1D is not an nn.Linear, so torchao does not convert it."""
        choice = self.float8
        if choice is None or options.get("conv1d") or not choice.converts(module):
            return super().linear(x, module, weight, out, bias=bias, **options)
        given, x = x, self.autocast_input(x, module)
        y = self._float8_product(x, given, module, weight, out, choice)
        return self.plus_bias(y, module, weight[0], y.dtype) if bias else y

    def _float8_product(
        self, x: Tensor, given: Tensor, module: str, weight: Shape, out: Shape, choice: Float8
    ) -> Tensor:
        """Cast both operands and multiply; backward casts three tensors, the output gradient twice."""
        tokens = _tokens(x, out)
        rows, columns = (*tokens, weight[1]), (*tokens, weight[0])
        small = self._float8_cast(x, f"{module} input", rows, tokens)
        sides = (
            [*small] if choice.gathered else [*small, *self._float8_cast(None, f"{module}.weight", weight, weight[:1])]
        )
        y = self.tape.new(f"{module} output", out, x.dtype, SOURCE)
        gradient = self.parameter_gradient(module, "weight", weight, self.parameters)
        copied = self._float8_bytes(f"{module}.weight, by columns", weight)
        prepares = [*self._float8_casting(f"{module} output gradient", columns, tokens)]
        if not choice.gathered:
            per_row = () if choice.recipe == "rowwise-gw-hp" else weight[1:]
            prepares += self._float8_casting(f"{module}.weight in backward", weight, per_row)
        scales = self._float8_scaled_later(f"{module} input gradient", rows)
        prepares += scales
        prepares.append((copied, 1))
        between = [(copied, -1)]
        between += [(index, -1) for index, _ in scales]
        if choice.recipe != "rowwise-gw-hp":
            between += self._float8_casting(f"{module} output gradient by columns", columns, weight[:1])
            between += self._float8_casting(f"{module} input in backward", rows, weight[1:])
            between += self._float8_scaled_later(f"{module}.weight gradient", weight)
            sides_copied = (f"{module} output gradient, by rows", columns), (f"{module} input, by columns", rows)
            between += [(self._float8_bytes(name, shape), 1) for name, shape in sides_copied]
        if self.parameters != x.dtype:  # computed in the compute dtype, and cast by the engine
            wide = self.tape.store(f"{module}.weight gradient in {x.dtype}", weight, x.dtype, SOURCE)
            between.append((wide, 1))
        node = Node(
            module,
            (x, *sides),
            (y,),
            (x.storage,),
            (VIEW, *(None for _ in sides)),
            referenced_by_caller=(given.storage,),
            backward=BackwardMemory(prepares=tuple(prepares), between=tuple(between)),
            parameters=(gradient,),
            variables=(x, Tensor(-1, weight, self.parameters, strided=True)),
            module=module,
            multiplies=True,
        )
        self.tape.record(node)
        return y

    def _float8_cast(self, x: Tensor | None, name: str, shape: Shape, scales: Shape) -> tuple[Tensor, Tensor]:
        """A cast in forward and its scale, without gradients; for a weight (None) nothing is read from the tape."""
        *moments, small = self._float8_moments(name, shape)
        made = (
            Tensor(small, shape, "uint8", grad=False),
            Tensor(self._float8_scale(name, scales), scales, "fp32", grad=False),
        )
        read, gradients = ((), ()) if x is None else ((x,), (None,))
        self.tape.nodes.append(
            Node(f"{name} in FP8", read, made, (), gradients, forward=ForwardMemory(temporaries=tuple(moments)))
        )
        return made

    def _float8_casting(self, name: str, shape: Shape, scales: Shape) -> list[tuple[int, int]]:
        """A cast in backward: scale, fp32, clamped fp32, then FP8, which stays allocated."""
        scaled, clamped, small = self._float8_moments(name, shape)
        return [
            (self._float8_scale(name, scales), 1),
            (scaled, 1),
            (clamped, 1),
            (small, 1),
            (clamped, -1),
            (scaled, -1),
        ]

    def _float8_moments(self, name: str, shape: Shape) -> tuple[int, int, int]:
        """Storages of a cast: scaled in fp32; clamped in fp32; in FP8."""
        scaled, clamped = (
            self.tape.store(f"{name} {options}", shape, "fp32", CAST) for options in ("scaled", "clamped")
        )
        return scaled, clamped, self._float8_bytes(name, shape)

    def _float8_bytes(self, name: str, shape: Shape) -> int:
        return self.tape.store(f"{name} in FP8", shape, "uint8", CAST)

    def _float8_scale(self, name: str, axes: Shape) -> int:
        """One scale for the tensor, or one per row."""
        assert self.float8 is not None
        shape = () if self.float8.recipe == "tensorwise" else axes
        return self.tape.store(f"{name} scale", shape, "fp32", CAST)

    def _float8_scaled_later(self, name: str, shape: Shape) -> list[tuple[int, int]]:
        """Scales expanded to the full matrix: without fast accumulation a matmul's result is scaled afterwards."""
        assert self.float8 is not None
        if self.float8.recipe == "tensorwise":
            return []
        return [(self.tape.store(f"{name} scales", shape, "fp32", f"{PRODUCT}: addmm_float8_unwrapped"), 1)]


def _tokens(x: Tensor, out: Shape) -> Shape:
    """Return the axes of tokens: the fewer leading axes, since input or output may be split into heads."""
    return min(x.shape[:-1], out[:-1], key=len)
