"""Whole numbers of many configurations that formulas can use like a single number.

The formulas of `memcalc.estimation` are written for one configuration and contain conditions such as "if the
sequence fills the window". `VectorInt` is an array that behaves as one number while a condition has the same result for
all entries. If the results differ, `pieces` calls the function again, once for each group of entries.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]  # whole numbers; float64 is exact up to 2^53 and does not wrap around beyond
Flags = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.intp]
Result = TypeVar("Result")


class Divergence(Exception):
    """A condition differs between entries.

    Args:
        chosen: the entries for which it is true. [n]
    """

    def __init__(self, chosen: Flags) -> None:
        super().__init__()
        self.chosen = chosen


def _decided(truth: Flags) -> bool:
    first = bool(truth[0])
    if (truth == first).all():
        return first
    raise Divergence(truth)


def plain(value: Any) -> Any:
    """Return the array of `VectorInt`; a single number unchanged."""
    return value.values if isinstance(value, VectorInt) else value


def _binary(function: Callable[[Any, Any], Any]) -> Callable[[VectorInt, Any], VectorInt]:
    return lambda self, other: VectorInt(function(self.values, plain(other)))


def _reflected(function: Callable[[Any, Any], Any]) -> Callable[[VectorInt, Any], VectorInt]:
    return lambda self, other: VectorInt(function(plain(other), self.values))


def _comparison(function: Callable[[Any, Any], Any]) -> Callable[[VectorInt, Any], bool]:
    return lambda self, other: _decided(function(self.values, plain(other)))


class VectorInt:
    """One whole number for each of several configurations. A comparison returns a single bool, or raises `Divergence`.

    Args:
        values: the numbers. [n]
    """

    __slots__ = ("_hash", "values")

    def __init__(self, values: Numbers) -> None:
        self.values = values
        self._hash: int | None = None

    __add__ = __radd__ = _binary(operator.add)
    __sub__, __rsub__ = _binary(operator.sub), _reflected(operator.sub)
    __mul__ = __rmul__ = _binary(operator.mul)
    __floordiv__, __rfloordiv__ = _binary(operator.floordiv), _reflected(operator.floordiv)
    __truediv__, __rtruediv__ = _binary(operator.truediv), _reflected(operator.truediv)
    __mod__, __rmod__ = _binary(operator.mod), _reflected(operator.mod)
    __lt__, __le__ = _comparison(operator.lt), _comparison(operator.le)
    __gt__, __ge__ = _comparison(operator.gt), _comparison(operator.ge)
    __eq__, __ne__ = _comparison(operator.eq), _comparison(operator.ne)

    def __hash__(self) -> int:
        """Hash the content, so that equal numbers share cached results."""
        if self._hash is None:
            self._hash = hash(self.values.tobytes())
        return self._hash

    def __neg__(self) -> VectorInt:
        """Negate each entry."""
        return VectorInt(-self.values)

    def __bool__(self) -> bool:
        """Return whether the entries are nonzero."""
        return _decided(self.values != 0)

    def __index__(self) -> int:
        """Return the number that all entries share; raise `Divergence` if they differ."""
        same = self.values == self.values[0]
        if not same.all():
            raise Divergence(same)
        return int(self.values[0])

    __int__ = __index__

    def __rlshift__(self, other: int) -> VectorInt:
        """Return other·2^n, as for an int."""
        return VectorInt(other * np.exp2(self.values))

    def bit_length(self) -> VectorInt:
        """Return the bit length, as for an int that is not negative."""
        return VectorInt(np.frexp(self.values)[1].astype(np.float64))

    def __format__(self, form: str) -> str:
        """Format as an int; a message that contains the number applies to the entries with this number only."""
        return format(int(self), form)

    def __str__(self) -> str:
        """Return the string of an int."""
        return str(int(self))


def pieces(
    function: Callable[[dict[str, Any]], Result], arguments: Mapping[str, Numbers]
) -> Iterator[tuple[Any, Result]]:
    """Yield the results of a function for arrays of arguments, each with the entries that it applies to.

    Args:
        function: takes `VectorInt` for each argument; called again for groups of entries if a condition differs.
        arguments: whole numbers. [n] each
    """
    members = np.arange(len(next(iter(arguments.values()))))
    waiting: list[Any] = [slice(None)]  # slice(None): all entries, without a copy of the arrays
    while waiting:
        where = waiting.pop()
        try:
            found = function({name: VectorInt(values[where]) for name, values in arguments.items()})
        except Divergence as parted:
            some = members[where]
            waiting += [some[~parted.chosen], some[parted.chosen]]
        else:
            yield where, found


def elementwise(
    function: Callable[[dict[str, Any]], Mapping[str, Any]], arguments: Mapping[str, Numbers]
) -> dict[str, Any]:
    """Return the numbers that a function computes, by name, for arrays of arguments; see `pieces`.

    A number that is equal for all entries stays a single number.

    Args:
        function: see `pieces`; it returns the same names for all entries.
        arguments: whole numbers. [n] each
    """
    found = [*pieces(function, arguments)]
    if len(found) == 1:
        return {name: plain(value) for name, value in found[0][1].items()}
    count = len(next(iter(arguments.values())))
    return {name: _joined(count, [(where, values[name]) for where, values in found]) for name in found[0][1]}


def _joined(count: int, found: list[tuple[Any, Any]]) -> Any:
    first = found[0][1]
    if not any(isinstance(value, VectorInt) or value != first for _, value in found):
        return first
    joined = np.empty(count)
    for where, value in found:
        joined[where] = plain(value)
    return joined
