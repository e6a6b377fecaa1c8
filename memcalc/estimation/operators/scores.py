"""What families do to attention scores: positions as a bias, and numbers in place of what a mask hides."""

from __future__ import annotations

from memcalc.estimation.operators.base import DERIVATIVES, Base
from memcalc.estimation.tape import NEW, Node, Shape, Tensor


class Scores(Base):
    """Products with a bias, and choices by a mask."""

    def biased_matmul(self, bias: Tensor, a: Tensor, b: Tensor, name: str, out: Shape) -> Tensor:
        """alpha · a @ b + bias, which needs no gradient (baddbmm): keeps both factors.

        Each factor's gradient is a product that is then scaled.
        """
        if self.autocast:
            b, a, bias = self.cast(b, self.compute), self.cast(a, self.compute), self.cast(bias, self.compute, "bias")
        y = self.tape.new(name, out, a.dtype, "aten::baddbmm")
        product = self.tape.store(f"{name}: gradient before it is scaled", b.shape, b.dtype, DERIVATIVES)
        saved = tuple(factor for factor, partner in ((b, a), (a, b)) if partner.grad)
        node = Node(name, (a, b), (y,), tuple(factor.storage for factor in saved), (NEW, NEW), variables=saved)
        node.between = ((product, 1), (product, -1)) if b.grad else ()
        node.caller_holds = (bias.storage,) if bias.storage >= 0 else ()
        self.tape.record(node)
        return y

    def where(self, x: Tensor, name: str, mask: Shape) -> Tensor:
        """x where a mask that is there says so, else a number; keeps the mask."""
        y = self.tape.new(name, x.shape, x.dtype, DERIVATIVES)
        self.tape.record(Node(name, (x,), (y,), (), (NEW,)))
        self.tape.also_saves(Tensor(-1, mask, "bool"))
        return y
