"""Parameters of tests: a spread of them in the quick tests, all of them in the long ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def quick_every(step: int, values: Iterable[Any], *, first: int = 0, unpack: bool = False) -> list[Any]:
    """Mark all values as long except each `step`-th, beginning with number `first`.

    Args:
        step: 2 leaves every other one.
        values: of one argument; with `unpack` tuples of several arguments.
        first: number of the first quick value.
        unpack: whether each value is a tuple of arguments.
    """
    return [
        pytest.param(*(value if unpack else (value,)), marks=() if at % step == first else pytest.mark.long)
        for at, value in enumerate(values)
    ]
