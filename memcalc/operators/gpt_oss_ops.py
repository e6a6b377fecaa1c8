"""Operators of gpt-oss: biases of experts, clamps, and attention sinks (a logit per head)."""

from __future__ import annotations

from typing import Literal

from memcalc.operators.base import DERIVATIVES, Base
from memcalc.operators.routing import INDEXING
from memcalc.programs import operator_workspaces
from memcalc.programs.tape import NEW, REDUCED, SAME, BackwardMemory, ForwardMemory, Node, Shape, Tensor


class GptOssOps(Base):
    """Rows of parameters, clamps, and the maximum subtracted before a softmax."""

    def rows_of_bias(
        self, module: str, bias: Shape, index: Tensor, out: Shape, tensor: Literal["weight", "bias"] = "bias"
    ) -> Tensor:
        """Index a parameter with one row per token copy; saves the index. Its gradient sums over all copies."""
        tape, trains = self.tape, self.trains(module)
        y = tape.new(f"{module} {tensor} of each copy", out, self.parameters, "aten::index", grad=trains)
        gradients: tuple[int, ...] = ()
        scratch: tuple[int, ...] = ()
        if trains:
            gradients = (self.parameter_gradient(module, tensor, bias, self.parameters),)
            rule = operator_workspaces.named(operator_workspaces.add_rows, indices=index.shape, rows=bias[:1])
            scratch = (tape.store(f"{module} {tensor}: sorted indices", (), "uint8", INDEXING, rule=rule),)
        saved = (index.storage,) if trains else ()
        node = Node(
            f"{module} {tensor}",
            (),
            (y,),
            saved,
            (),
            backward=BackwardMemory(temporaries=scratch),
            parameters=gradients,
        )
        tape.record(node)
        return y

    def clamp(self, x: Tensor, name: str, bounds: int) -> Tensor:
        """Clamp to an upper bound, or between two; saves x. Backward compares x with each bound again.

        torch 2.13 torch/csrc/autograd/FunctionsManual.cpp, clamp_backward: where(x >= min and x <= max, gradient, 0).
        """
        tape = self.tape
        y = tape.new(name, x.shape, x.dtype, DERIVATIVES)
        zero = tape.store(f"{name}: zero", (), x.dtype, DERIVATIVES)
        masks = [tape.store(f"{name}: within a bound", x.shape, "bool", DERIVATIVES) for _ in range(bounds)]
        on_the_way = tuple((index, 1) for index in (zero, *masks))
        tape.record(
            Node(name, (x,), (y,), (x.storage,), (NEW,), backward=BackwardMemory(prepares=on_the_way), variables=(x,))
        )
        return y

    def expand_parameter(self, module: str, parameter: Shape, out: Shape) -> Tensor:
        """Expand a parameter over sequences and tokens: no bytes; its gradient is a sum over them."""
        tape, trains = self.tape, self.trains(module)
        y = Tensor(tape.store(f"{module} view", ("0",), self.parameters, DERIVATIVES), out, self.parameters, trains)
        gradients = (self.parameter_gradient(module, "weight", parameter, self.parameters),) if trains else ()
        tape.record(Node(module, (), (y,), (), (), parameters=gradients, module=module))
        return y

    def minus_largest(self, x: Tensor, name: str) -> Tensor:
        """x - x.max(dim=-1): saves the maximum's index; its gradient is scattered into a tensor of zeros."""
        tape, largest = self.tape, (*x.shape[:-1], "1")
        top = tape.new(f"{name}: largest", largest, x.dtype, DERIVATIVES)
        place = tape.store(f"{name}: index of the largest", largest, "int64", DERIVATIVES)
        tape.record(Node(f"{name}: largest", (x,), (top,), (place,), (NEW,), forward=ForwardMemory(also=(place,))))
        return self.result(name, x.shape, x.dtype, (x, top), (), (SAME, REDUCED))
