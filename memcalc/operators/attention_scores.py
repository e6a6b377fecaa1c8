"""Operators on attention scores: additive bias, masking, in-place scaling."""

from __future__ import annotations

from memcalc.operators.base import DERIVATIVES, Base
from memcalc.programs import operator_workspaces
from memcalc.programs.tape import NEW, SAME, SCALED, BackwardMemory, Node, Shape, Tensor


class AttentionScores(Base):
    """Matmuls with a bias, masking, and views of key/value heads shared by query heads."""

    def biased_matmul(self, bias: Tensor, a: Tensor, b: Tensor, name: str, out: Shape) -> Tensor:
        """alpha · a @ b + bias (baddbmm), with a bias without gradient; saves both factors.

        Each factor's gradient is a matmul, then scaled.
        """
        if self.autocast:
            b, a, bias = self.cast(b, self.compute), self.cast(a, self.compute), self.cast(bias, self.compute, "bias")
        y = self.tape.new(name, out, a.dtype, "aten::baddbmm")
        saved = tuple(factor for factor, partner in ((b, a), (a, b)) if partner.grad)
        node = Node(
            name,
            (a, b),
            (y,),
            tuple(factor.storage for factor in saved),
            (SCALED, SCALED),
            variables=saved,
            multiplies=True,
        )
        node.referenced_by_caller = (bias.storage,) if bias.storage >= 0 else ()
        self.tape.record(node)
        return y

    def where(self, x: Tensor, name: str, mask: Shape) -> Tensor:
        """x where an existing mask is true, else a number; saves the mask."""
        y = self.tape.new(name, x.shape, x.dtype, DERIVATIVES)
        self.tape.record(Node(name, (x,), (y,), (), (NEW,)))
        self.tape.also_saves(Tensor(-1, mask, "bool"))
        return y

    def chosen(self, truth: Tensor, a: Tensor, b: Tensor, name: str) -> Tensor:
        """a where `truth`, else b; saves `truth`. Both gradients are new tensors, first that of b (`other`)."""
        return self.result(name, a.shape, a.dtype, (b, a, truth), (truth.storage,), (NEW, NEW, None))

    def divide_by_number(self, x: Tensor, name: str) -> Tensor:
        """x /= a number, in place; backward allocates a new tensor."""
        y = Tensor(x.storage, x.shape, x.dtype)
        self.tape.record(Node(name, (x,), (y,), (), (NEW,)))
        return y

    def multiply_in_place(self, x: Tensor, name: str, dtype: str) -> Tensor:
        """x *= a buffer of one element, in place; saves the buffer. Backward allocates a new tensor."""
        y = Tensor(x.storage, x.shape, x.dtype)
        self.tape.record(Node(name, (x,), (y,), (), (NEW,), keeps_weight=True))
        self.tape.also_saves(Tensor(-1, ("1",), dtype))
        return y

    def add_in_place(self, x: Tensor, other: Tensor, name: str) -> Tensor:
        """x += other, in place; the gradient of `other`, if it has one, is cast where it has another dtype."""
        y = Tensor(x.storage, x.shape, x.dtype)
        of_other = (SAME if other.dtype == x.dtype else NEW) if other.grad else None
        self.tape.record(Node(name, (x, other), (y,), (), (SAME, of_other)))
        return y

    def one_row(self, x: Tensor, out: Shape, name: str) -> Tensor:
        """x[..., [i], :], a copy; backward adds it into a tensor of zeros as large as x. The index is on the CPU."""
        tape = self.tape
        y = tape.new(name, out, x.dtype, "aten::index")
        rule = operator_workspaces.named(operator_workspaces.add_rows, indices=("1",), rows=("h_kv",))
        scratch = tape.store(f"{name}: sorted index", (), "uint8", "ATen native/cuda/Indexing.cu", rule=rule)
        tape.record(Node(name, (x,), (y,), (), (NEW,), backward=BackwardMemory(temporaries=(scratch,))))
        return y
