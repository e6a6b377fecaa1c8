"""PyTorch's kernels in Python without what they load for symbolic sizes: a computer algebra system.

They ask functions of torch.fx.experimental.symbolic_shapes for truths, and sympy for a class, where nothing but numbers
comes by; to load the two takes longer than a small model's step (torch 2.13: _check_with, elementwise_dtypes,
empty_like and their like).
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
    """Something else than a number was asked about: PyTorch's own functions must say."""


class Symbol:
    """Nothing is one."""


def known(value: Any) -> Any:
    """A truth or a number that nobody need find out."""
    if type(value) not in (bool, int):
        raise NotPlainError
    return value


def equal(one: Any, other: Any) -> bool:
    """Of numbers, or of sizes."""
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
    """Inside, what PyTorch imports for symbols knows numbers only, unless it has been loaded.

    What asks for more ends in an error: an ImportError, or `NotPlainError`.
    """
    if SYMBOLIC_SHAPES in sys.modules:
        yield
        return
    with mock.patch.dict(sys.modules, STAND_INS):
        yield
