"""PyTorch's Python kernels without the imports for symbolic sizes, which include a computer algebra system.

The kernels call functions of torch.fx.experimental.symbolic_shapes, and use a class of sympy, even for plain numbers.
Importing both takes longer than a small model's step (torch 2.13: _check_with, elementwise_dtypes, empty_like and
others).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

SYMBOLIC_SHAPES = "torch.fx.experimental.symbolic_shapes"


class NotPlainError(Exception):
    """A function got something other than a number, so PyTorch's own function is needed."""


class Symbol:
    """Stand-in for sympy.Basic; it has no instances."""


def known(value: Any) -> Any:
    """Return a bool or int unchanged; raise `NotPlainError` for anything else."""
    if type(value) not in (bool, int):
        raise NotPlainError
    return value


def equal(one: Any, other: Any) -> bool:
    """Return whether two numbers, or two sequences of sizes, are equal."""
    return bool(known(one) == known(other) if isinstance(one, int) else list(one) == list(other))


FUNCTIONS = {
    **dict.fromkeys(("guard_or_false", "guard_or_true", "guard_size_oblivious", "guard_int", "expect_true"), known),
    **dict.fromkeys(("statically_known_true", "guarding_hint_or_throw"), known),
    "has_guarding_hint": lambda _: True,
    "is_nested_int": lambda _: False,
    "sym_and": lambda *truths: all(map(known, truths)),
    "sym_or": lambda *truths: any(map(known, truths)),
    "sym_eq": equal,
}


def _stand_ins() -> dict[str, ModuleType]:
    shapes, algebra = ModuleType(SYMBOLIC_SHAPES), ModuleType("sympy")
    vars(shapes).update(FUNCTIONS)
    vars(algebra).update(Basic=Symbol)
    return {SYMBOLIC_SHAPES: shapes, "sympy": algebra}


STAND_INS = _stand_ins()


@contextmanager
def plain_numbers() -> Iterator[None]:
    """Replace PyTorch's imports for symbols by versions for plain numbers, unless the real ones are loaded.

    Any other use raises an ImportError or `NotPlainError`.
    """
    if SYMBOLIC_SHAPES in sys.modules:
        yield
        return
    with mock.patch.dict(sys.modules, STAND_INS):
        yield
