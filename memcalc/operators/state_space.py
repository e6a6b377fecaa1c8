"""Operators of Mamba-2 in chunks of tokens: padding, sums along a sequence, and batched matmuls of chunks."""

from __future__ import annotations

from memcalc.operators.base import DERIVATIVES
from memcalc.operators.elementwise import Elementwise
from memcalc.programs.tape import NEW, REDUCED, SUMMED, VIEW, BackwardMemory, Node, Shape, Tensor

CUMSUM = "torch 2.13 torch/csrc/autograd/FunctionsManual.h, cumsum_backward: flip, cumsum, flip"
CLAMP = "torch 2.13 torch/csrc/autograd/FunctionsManual.cpp, clamp_backward"


class StateSpace(Elementwise):
    """The state-space duality of Mamba-2 as PyTorch operators, without the package mamba-ssm."""

    def padded(self, x: Tensor, out: Shape, name: str) -> Tensor:
        """A copy of x with zeros at an end of an axis (constant_pad_nd), even if there are none; saves nothing."""
        return self.result(name, out, x.dtype, (x,), (), (NEW,), citation="aten::constant_pad_nd")

    def sliced(self, x: Tensor, out: Shape, name: str) -> Tensor:
        """One slice of x, a view; its gradient is a tensor of zeros as large as x, with the slice filled."""
        y = Tensor(x.storage, out, x.dtype, strided=True)
        self.tape.record(Node(name, (x,), (y,), (), (NEW,)))
        return y

    def spread(self, x: Tensor, out: Shape, name: str) -> Tensor:
        """A view of x repeated along a new last axis; its gradient is summed over that axis and viewed without it."""
        y = Tensor(x.storage, out, x.dtype, strided=True)
        self.tape.record(Node(name, (x,), (y,), (), (VIEW,)))
        return y

    def cumulative(self, x: Tensor, name: str, out: Shape | None = None) -> Tensor:
        """The sums of all numbers up to each one along an axis (cumsum); saves nothing.

        Backward sums in the opposite order, between two copies.
        """
        y = self.tape.new(name, out or x.shape, x.dtype, DERIVATIVES)
        flipped, summed = (
            self.tape.store(f"{name}: {step} gradient", y.shape, y.dtype, CUMSUM) for step in ("flipped", "summed")
        )
        self.tape.record(
            Node(
                name,
                (x,),
                (y,),
                (),
                (NEW,),
                backward=BackwardMemory(prepares=((flipped, 1), (summed, 1)) if x.grad else ()),
            )
        )
        return y

    def exp_of_parameter(self, module: str, width: str, name: str) -> Tensor:
        """exp(weight.float()) of a parameter with few numbers; saves its output."""
        gradients: tuple[int, ...] = ()
        if self.trains(module):
            gradients = (self.parameter_gradient(module, "weight", (width,), self.parameters),)
        given: tuple[Tensor, ...] = ()
        if self.parameters != "fp32":
            wide = self.tape.new(f"{module} in fp32", (width,), "fp32", "aten::_to_copy", grad=bool(gradients))
            self.tape.record(Node(f"{module} in fp32", (), (wide,), (), (), parameters=gradients))
            given, gradients = (wide,), ()
        y = self.tape.new(name, (width,), "fp32", DERIVATIVES)
        self.tape.record(Node(name, given, (y,), (y.storage,), (NEW,) * len(given), parameters=gradients))
        return y

    def clamped(self, x: Tensor, name: str, sides: tuple[str, ...] = ("lower", "upper")) -> Tensor:
        """x between two numbers, or beyond one; saves x. Backward compares x with each of them."""
        y = self.tape.new(name, x.shape, x.dtype, DERIVATIVES)
        masks = tuple((self.tape.store(f"{name}: {side} bound", x.shape, "bool", CLAMP), 1) for side in sides)
        self.tape.record(
            Node(name, (x,), (y,), (x.storage,), (NEW,), backward=BackwardMemory(prepares=masks if x.grad else ()))
        )
        return y

    def less_than_last(self, x: Tensor, last: Tensor, name: str) -> Tensor:
        """The last number of each row minus x; saves nothing. Its gradient is a sum, that of x is negated."""
        return self.result(name, x.shape, x.dtype, (x, last), (), (NEW, SUMMED))

    def times_row(self, x: Tensor, row: Tensor, name: str) -> Tensor:
        """x times one number per entry of the last axis; saves each if the other one requires a gradient.

        The row's gradient is first as large as x, then summed.
        """
        y = self.tape.new(name, x.shape, x.dtype, DERIVATIVES, grad=x.grad or row.grad)
        saved = tuple(t for t, other in ((row, x), (x, row)) if other.grad)
        kinds = (NEW if x.grad else None, REDUCED if row.grad else None)
        storages = tuple(t.storage for t in saved)
        self.tape.record(Node(name, (x, row), (y,), storages, kinds, variables=saved))
        return y

    def segment_sums(self, x: Tensor, pairs: Shape, name: str) -> Tensor:
        """segment_sum of transformers: the sums of all numbers between two positions; saves two masks of pairs."""
        spread = self.spread(x, pairs, f"{name}: numbers for each pair")
        size = pairs[-2:]
        ones = self.table(f"{name}: ones", size, "bool")
        lower = self.table(f"{name}: pairs before", size, "bool", of=(ones,))
        mask = self.table(f"{name}: mask of pairs not before", size, "bool", of=(lower,))
        first = self._filled(spread, mask, f"{name}: numbers of earlier pairs")
        sums = self.cumulative(first, f"{name}: sums of pairs")
        ones = self.table(f"{name}: ones again", size, "bool")
        causal = self.table(f"{name}: pairs before or equal", size, "bool", of=(ones,))
        self.tape.still_referenced(lower)
        mask = self.table(f"{name}: mask of pairs after", size, "bool", of=(causal,))
        y = self._filled(sums, mask, name)
        self.tape.still_referenced(first, causal)
        return y

    def _filled(self, x: Tensor, mask: Tensor, name: str) -> Tensor:
        """masked_fill of a view that may be broadcast; saves the mask."""
        return self.result(name, x.shape, x.dtype, (x, mask), (mask.storage,), (NEW, None))

    def contracted(
        self,
        left: Tensor,
        right: Tensor,
        name: str,
        out: Shape,
        copies: tuple[bool, bool],
        *,
        copies_gradient: bool,
        left_first: bool = False,
    ) -> Tensor:
        """torch.einsum of two tensors: a batched matmul of views, or of copies where views do not suffice.

        Saves each factor, or its copy, if the other one requires a gradient. The gradients of the factors are views.

        Args:
            left: the first factor of the matmul.
            right: the second one.
            name: name of the result.
            out: its axes.
            copies: whether each factor is copied.
            copies_gradient: whether backward copies the gradient of the result.
            left_first: whether autocast casts the first factor first.
        """
        given = (left, right)
        if self.autocast:
            if left_first:
                left = self.cast(left, self.compute, f"{name}: left factor in {self.compute}")
            right = self.cast(right, self.compute, f"{name}: right factor in {self.compute}")
            left = self.cast(left, self.compute, f"{name}: left factor in {self.compute}")
        cast = (left, right)
        if copies[0]:
            left = self.copy(left, f"{name}: left factor in order")
        if copies[1]:
            right = self.copy(right, f"{name}: right factor in order")
        y = self.tape.new(name, out, left.dtype, "aten::bmm", grad=left.grad or right.grad)
        saved = tuple(factor for factor, partner in ((left, right), (right, left)) if partner.grad)
        kinds = tuple(VIEW if factor.grad else None for factor in (right, left))  # of mat2 before self
        storages = tuple(factor.storage for factor in saved)
        self.tape.record(Node(name, (right, left), (y,), storages, kinds, variables=saved, multiplies=True))
        self.tape.still_referenced(*given, *cast)
        return self.restrided_view(y, f"{name} in order") if copies_gradient else y
