"""Operators of modules with fp32 parameters in a model with bf16 or fp16 parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from memcalc.operators.base import Base
from memcalc.programs.tape import Shape, Tensor
from memcalc.spec.fp32_modules import in_fp32


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
