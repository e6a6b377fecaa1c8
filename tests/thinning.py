"""Parameters of tests: a regular sample of them in the quick tests (`make test`), all in `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def quick_every(step: int, values: Iterable[Any], *, first: int = 0, unpack: bool = False) -> list[Any]:
    """Return the values as parameters of a test, all marked long except every `step`-th, beginning with `first`.

    Args:
        step: 2 runs every other value in the quick tests.
        values: values of one argument; with `unpack`, tuples of several arguments.
        first: number of the first quick value.
        unpack: whether each value is a tuple of arguments.
    """
    return [
        pytest.param(*(value if unpack else (value,)), marks=() if at % step == first else pytest.mark.long)
        for at, value in enumerate(values)
    ]
