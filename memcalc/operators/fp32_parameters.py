"""Operators of fp32 parameters in a model with bf16 or fp16 ones, and of norm weights that are upcast to fp32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from memcalc.ledger.component import Component
from memcalc.operators.base import DERIVATIVES, Base
from memcalc.programs.tape import NEW, SAME, SUMMED, BackwardMemory, Node, Shape, Tensor
from memcalc.spec.fp32_modules import in_fp32


class Fp32NormWeight(Base):
    """Multiplication by a norm weight that is upcast to fp32."""

    def times_fp32_weight(
        self, x: Tensor, module: str, weight: Shape, *, shifted: bool = False, second: bool = False
    ) -> Tensor:
        """x in fp32 times `weight.float()`, or 1 plus it; saves x, and the factor where it is not the parameter itself.

        The factor's gradient is a product as large as x, summed over all tokens. `weight * x`, and `x * (1 + weight)`.

        Args:
            x: the input; its last axes are those of the weight.
            module: the module of the weight.
            weight: axes of the weight.
            shifted: whether 1 is added.
            second: whether the weight is the second factor, as it is with 1 added.
        """
        second = second or shifted
        tape, trains = self.tape, self.trains(module)
        y = tape.new(f"{module} output in fp32", x.shape, "fp32", DERIVATIVES)
        gradient = self.parameter_gradient(module, "weight", weight, self.parameters) if trains else None
        factor = self._factor(module, weight, gradient, shifted=shifted)
        own = self.parameters == "fp32"  # in this case the sum is the parameter's gradient
        summed = (gradient,) if gradient is not None and own else ()
        sums: tuple[tuple[int, int], ...] = ()
        raw: tuple[tuple[int, int], ...] = ()  # the product before the sum
        if trains:
            product = tape.store(f"{module} gradient times input", x.shape, "fp32", DERIVATIVES)
            tokens = tuple(x.shape[: -len(weight)])
            raw = ((product, 1),)
            sums = (*((index, 1) for index in summed), *self.column_sum(module, "weight", tokens, weight))
        saved = (*((x.storage,) if trains else ()), *((factor.storage,) if factor.storage >= 0 and x.grad else ()))
        node = Node(
            module,
            (x, factor),
            (y,),
            saved,
            (NEW, SUMMED if factor.grad else None),
            # gradient of the second factor before the first (derivatives.yaml, by name)
            backward=BackwardMemory(
                prepares=raw if second else (), between=() if second else raw, summed=summed, summed_later=sums
            ),
            parameters=summed,
            keeps_weight=not trains and factor.storage < 0,
            variables=(*((x,) if trains else ()), *((factor,) if x.grad else ())),
            module=module,
        )
        tape.record(node)
        return y

    def _factor(self, module: str, weight: Shape, gradient: int | None, *, shifted: bool) -> Tensor:
        """The weight in fp32, plus 1 if shifted; for an fp32 parameter the sum's gradient is the weight's own."""
        tape, name = self.tape, f"{module}.weight"
        factor = Tensor(-1, weight, "fp32", grad=False)
        if self.parameters != "fp32":
            # A copy of a parameter is no activation: a temporary, as in the trace.
            copied = tape.store(f"{name} in fp32", weight, "fp32", "aten::_to_copy", component=Component.TEMPORARIES)
            factor = Tensor(copied, weight, "fp32", grad=gradient is not None)
            parameters = () if gradient is None else (gradient,)
            tape.record(Node(f"{name} in fp32", (), (factor,), (), (), parameters=parameters))
        if shifted:
            given = (factor,) if factor.storage >= 0 else ()
            factor = tape.new(f"1 + {name}", weight, "fp32", DERIVATIVES, grad=factor.grad)
            tape.record(Node(f"1 + {name}", given, (factor,), (), (SAME,) * len(given)))
        return factor


class Fp32Parameters(Base):
    """Operators that read parameters in the dtype of their module."""

    @contextmanager
    def as_stored(self, module: str) -> Iterator[None]:
        """Context in which parameters have the dtype of one module."""
        before = self.parameters
        if in_fp32(module, self.fp32_modules):
            self.parameters = "fp32"
        try:
            yield
        finally:
            self.parameters = before

    def linear(self, x: Tensor, module: str, weight: Shape, out: Shape, **options: Any) -> Tensor:
        """See `LoraLinear.linear`."""
        with self.as_stored(module):
            return super().linear(x, module, weight, out, **options)  # type: ignore[misc, no-any-return]

    def embedding(self, module: str, table: Shape, tokens: Shape, **options: Any) -> Tensor:
        """See `Linear.embedding`."""
        with self.as_stored(module):
            return super().embedding(module, table, tokens, **options)  # type: ignore[misc, no-any-return]

    def layer_norm(self, x: Tensor, module: str, *args: Any, **options: Any) -> Tensor:
        """See `Norms.layer_norm`."""
        with self.as_stored(module):
            return super().layer_norm(x, module, *args, **options)  # type: ignore[misc, no-any-return]

    def times_weight(
        self, x: Tensor, module: str, width: str, out: Shape | None = None, *, second: bool = False
    ) -> Tensor:
        """See `Elementwise.times_weight`."""
        with self.as_stored(module):
            return super().times_weight(x, module, width, out, second=second)  # type: ignore[misc, no-any-return]

    def times_fp32_weight(
        self, x: Tensor, module: str, weight: Shape, *, shifted: bool = False, second: bool = False
    ) -> Tensor:
        """See `Fp32NormWeight.times_fp32_weight`."""
        with self.as_stored(module):
            return super().times_fp32_weight(x, module, weight, shifted=shifted, second=second)  # type: ignore[misc, no-any-return]
