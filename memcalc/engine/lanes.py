"""Functions of whole numbers, run on many numbers at once.

A rule such as "if more than 3072 indices are sorted" decides by its argument. `Lanes` holds one argument for each of
many configurations and behaves as one number as long as they all decide alike; where they part, the function is run
again on those that said yes and on those that said no. So rules are written once, for a single number.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]

MOST = 16_384  # arguments of which a function is run at a time: they stay in the processor's cache


class Parted(Exception):
    """Lanes have come to different decisions; `chosen` are those that said yes."""

    def __init__(self, chosen: npt.NDArray[np.bool_]) -> None:
        super().__init__()
        self.chosen = chosen


def _decided(truth: npt.NDArray[np.bool_]) -> bool:
    first = bool(truth[0])
    if (truth == first).all():
        return first
    raise Parted(truth)


def _binary(function: Callable[[Any, Any], Any]) -> Callable[[Lanes, Any], Lanes]:
    return lambda self, other: self._made(function(self.values, _plain(other)))


def _reflected(function: Callable[[Any, Any], Any]) -> Callable[[Lanes, Any], Lanes]:
    return lambda self, other: self._made(function(_plain(other), self.values))


def _comparison(function: Callable[[Any, Any], Any]) -> Callable[[Lanes, Any], bool]:
    return lambda self, other: _decided(function(self.values, _plain(other)))


def _plain(value: Any) -> Any:
    return value.values if isinstance(value, Lanes) else value


class Lanes:
    """One number for each of several configurations. Comparisons are plain truth values, or raise `Parted`."""

    __slots__ = ("values",)
    __hash__ = None  # type: ignore[assignment] # nothing may be kept under it

    def __init__(self, values: Any) -> None:
        self.values = values

    @classmethod
    def _made(cls, values: Any) -> Lanes:
        """What an operation comes to."""
        return cls(values)

    __add__, __radd__ = _binary(operator.add), _reflected(operator.add)
    __sub__, __rsub__ = _binary(operator.sub), _reflected(operator.sub)
    __mul__, __rmul__ = _binary(operator.mul), _reflected(operator.mul)
    __floordiv__, __rfloordiv__ = _binary(operator.floordiv), _reflected(operator.floordiv)
    __truediv__, __rtruediv__ = _binary(operator.truediv), _reflected(operator.truediv)
    __mod__, __rmod__ = _binary(operator.mod), _reflected(operator.mod)
    __lshift__, __rlshift__ = _binary(operator.lshift), _reflected(operator.lshift)
    __rshift__, __rrshift__ = _binary(operator.rshift), _reflected(operator.rshift)
    __lt__, __le__ = _comparison(operator.lt), _comparison(operator.le)
    __gt__, __ge__ = _comparison(operator.gt), _comparison(operator.ge)
    __eq__, __ne__ = _comparison(operator.eq), _comparison(operator.ne)

    def __neg__(self) -> Lanes:
        """The negative of each."""
        return self._made(-self.values)

    def __bool__(self) -> bool:
        """Whether they are other than zero."""
        return _decided(self.values != 0)

    def __index__(self) -> int:
        """The number, where all have the same."""
        if not (self.values == self.values[0]).all():
            raise Parted(self.values == self.values[0])
        return int(self.values[0])

    def bit_length(self) -> Lanes:
        """As of an integer."""
        rest, bits = self.values, np.zeros_like(self.values)
        for step in (32, 16, 8, 4, 2, 1):
            more = (rest >> step) > 0
            bits = bits + step * more
            rest = np.where(more, rest >> step, rest)
        return self._made(bits + (rest > 0))


class Spoken(Lanes):
    """Lanes that part where they are written in words, so that words are those of a single number."""

    __slots__ = ()
    __hash__ = None

    def __format__(self, form: str) -> str:
        """As of an integer."""
        return format(int(self), form)

    def __str__(self) -> str:
        """As of an integer."""
        return str(int(self))


def elementwise(
    function: Callable[[dict[Any, Any]], Mapping[str, Any]],
    arguments: Mapping[Any, Integers],
    kind: type[Lanes] = Lanes,
) -> dict[str, int | Integers]:
    """The results of a function of whole numbers, by name, for arrays of arguments of one length.

    A result that does not depend on them stays one number.

    Args:
        function: of one number each.
        arguments: the arrays.
        kind: of what the function gets for each.
    """
    (count,) = {len(values) for values in arguments.values()}
    pieces: list[tuple[Any, Mapping[str, Any]]] = []
    waiting: list[Any] = [slice(start, min(start + MOST, count)) for start in range(0, count, MOST)]
    while waiting:
        lanes = waiting.pop()
        try:
            pieces.append((lanes, function({name: kind(values[lanes]) for name, values in arguments.items()})))
        except Parted as parted:
            waiting += _parts(lanes, parted.chosen)
    return {name: _joined(count, [(lanes, found[name]) for lanes, found in pieces]) for name in pieces[0][1]}


def _parts(lanes: Any, chosen: npt.NDArray[np.bool_]) -> list[Any]:
    """Those of some lanes that are chosen and those that are not, as neighbours where they are."""
    if isinstance(lanes, slice):
        borders = np.flatnonzero(chosen[1:] != chosen[:-1])
        if len(borders) == 1:
            middle = lanes.start + int(borders[0]) + 1
            return [slice(lanes.start, middle), slice(middle, lanes.stop)]
        lanes = np.arange(lanes.start, lanes.stop)
    return [lanes[~chosen], lanes[chosen]]


def _joined(count: int, pieces: list[tuple[Any, Any]]) -> int | Integers:
    first = pieces[0][1]
    if len(pieces) == 1:
        return first.values if isinstance(first, Lanes) else first  # type: ignore[no-any-return]
    if not any(isinstance(value, Lanes) or value != first for _, value in pieces):
        return first  # type: ignore[no-any-return]
    joined = np.empty(count, dtype=np.int64)
    for lanes, value in pieces:
        joined[lanes] = _plain(value)
    return joined
