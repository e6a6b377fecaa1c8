"""Parameters of tests: a regular sample of them in the quick tests (`make test`), all in `make test-all`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
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


def quick_covering(
    traits: Callable[[Any], Iterable[Hashable]], values: Iterable[Any], *, unpack: bool = False
) -> list[Any]:
    """Return the values as parameters of a test, all marked long except those with a trait that none before has.

    Args:
        traits: of a value: what it exercises, such as its family, its engine and its dtype.
        values: values of one argument; with `unpack`, tuples of several arguments.
        unpack: whether each value is a tuple of arguments.
    """
    seen: set[Hashable] = set()
    found = []
    for value in values:
        new = set(traits(value)) - seen
        seen |= new
        found.append(pytest.param(*(value if unpack else (value,)), marks=() if new else pytest.mark.long))
    return found
