"""What rules of kernels' workspaces give for many batches, each asked once for every number that it knows.

Most rules know a batch by one product of symbols, b·s above all, and of its values there are fewer than of batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from operator import mul
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memcalc.engine.lanes import Integers, Lanes, elementwise
from memcalc.engine.reading import changed
from memcalc.estimation.allocation import rounded
from memcalc.estimation.program import Kind
from memcalc.estimation.symbols import symbol_values
from memcalc.spec.cards import Card
from memcalc.spec.spec import Spec

Names = tuple[str, ...]
Numbers = npt.NDArray[np.intp]

CLOSE = 4  # numbers up to so many times their count are looked up in a table, others are sorted


class Batches(NamedTuple):
    """Micro-batch sizes and sequence lengths, one of each a configuration. [n]"""

    micro_batch_size: Integers
    sequence_length: Integers

    def on(self, spec: Spec) -> Spec:
        """The run with these arrays."""
        return changed(spec, **self._asdict())


class Symbols:
    """The symbols of a run over all batches of a context.

    Attributes:
        batches: these.
        values: numbers, and arrays of those that differ from batch to batch.
    """

    def __init__(self, spec: Spec, card: Card | None, batches: Batches) -> None:
        self.batches = batches
        self.values = elementwise(lambda lanes: symbol_values(changed(spec, **lanes), card), batches._asdict())
        self._products: dict[Names, Integers] = {}

    def product(self, names: Names) -> Integers:
        """What some symbols come to, which differ from batch to batch."""
        if names not in self._products:
            factors: Any = [self.values[name] for name in names]
            self._products[names] = reduce(mul, factors)
        return self._products[names]


class Distinct(NamedTuple):
    """The values of an array, each once.

    Args:
        values: they.
        where: the number of its value for each entry of the array.
        array: itself.
    """

    values: Integers
    where: Numbers
    array: Integers


class Found(NamedTuple):
    """What a rule gives.

    Args:
        exact: its bytes, for each of some numbers.
        block: what the allocator hands out for them.
        where: which of the numbers each batch has; None if each has its own.
    """

    exact: Integers
    block: Integers
    where: Numbers | None

    def of(self, lanes: Numbers | slice) -> tuple[Integers, Integers]:
        """The bytes of some batches, and what the allocator hands out."""
        own = lanes if self.where is None else self.where[lanes]
        return self.exact[own], self.block[own]


class Rules:
    """Results of workspace rules over the same batches, which many runs share."""

    def __init__(self) -> None:
        self._known: dict[Kind, list[tuple[dict[str, int], dict[Names, Distinct], int | Found]]] = {}
        self._distinct: list[Distinct] = []

    def bytes(self, kind: Kind, symbols: Symbols) -> int | Found:
        """The bytes of one kind of storage; a number if no batch decides."""
        known = self._known.setdefault(kind, [])
        for numbers, products, found in known:
            if all(_equal(symbols.values[name], number) for name, number in numbers.items()) and all(
                _equal(symbols.product(names), distinct.array) for names, distinct in products.items()
            ):
                return found
        known.append(self._ask(kind, symbols))
        return known[-1][-1]

    def _ask(self, kind: Kind, symbols: Symbols) -> tuple[dict[str, int], dict[Names, Distinct], int | Found]:
        """What the rule asked for, and what it gave."""
        numbers: dict[str, int] = {}
        products: dict[Names, Distinct] = {}

        def rule(lanes: Mapping[Any, Lanes]) -> dict[str, int | Lanes]:
            return {"": _plain(kind.bytes(_Watched(symbols.values, numbers, lanes)))}

        while True:
            one = len(products) == 1
            arguments = {names: own.values if one else own.array for names, own in products.items()}
            try:
                found = (elementwise(rule, arguments) if arguments else rule({}))[""]
            except _Unknown as unknown:
                products[unknown.names] = self._distinct_of(symbols.product(unknown.names))
                continue
            if not isinstance(found, np.ndarray):
                return numbers, products, found  # type: ignore[return-value] # without lanes it is a number
            (first, *_) = products.values()
            block: Any = rounded(found)  # type: ignore[arg-type] # arrays count as numbers do
            return numbers, products, Found(found, block, first.where if one else None)

    def _distinct_of(self, array: Integers) -> Distinct:
        for known in self._distinct:
            if _equal(known.array, array):
                return known
        self._distinct.append(Distinct(*_distinct(array), array))
        return self._distinct[-1]


def _distinct(array: Integers) -> tuple[Integers, Numbers]:
    """The values of an array in order, and where each entry is among them."""
    if array.min() < 0 or array.max() > CLOSE * len(array):
        values, where = np.unique(array, return_inverse=True)
        return values, where
    there = np.zeros(int(array.max()) + 1, dtype=np.bool_)
    there[array] = True
    places = np.cumsum(there) - 1
    return np.flatnonzero(there), places[array]


def _equal(one: int | Integers, two: int | Integers) -> bool:
    if isinstance(one, np.ndarray) and isinstance(two, np.ndarray):
        return one is two or np.array_equal(one, two)
    return not isinstance(one, np.ndarray) and not isinstance(two, np.ndarray) and one == two


def _plain(found: int | Lanes) -> int | Lanes:
    """What a rule gave; a product that nothing was asked of yet is asked for itself."""
    return Lanes(found.values) if isinstance(found, _Product) else found


class _Unknown(Exception):
    """A rule asks for a product that it was not known to ask for."""

    def __init__(self, names: Names) -> None:
        super().__init__()
        self.names = names


class _Product(Lanes):
    """Symbols of which nothing was asked but products, and how many times these."""

    __slots__ = ("_known", "_names", "_times")
    __hash__ = None

    def __init__(self, names: Names, times: int, known: Mapping[Names, Lanes]) -> None:
        self._names, self._times, self._known = names, times, known

    @classmethod
    def _made(cls, values: Any) -> Lanes:
        return Lanes(values)

    @property
    def values(self) -> Any:
        """Their values.

        Raises:
            _Unknown: it is not among those that are known.
        """
        if self._names not in self._known:
            raise _Unknown(self._names)
        own = self._known[self._names].values
        return own if self._times == 1 else own * self._times

    def __mul__(self, other: Any) -> Lanes:
        """A further factor."""
        if isinstance(other, _Product):
            return _Product(tuple(sorted(self._names + other._names)), self._times * other._times, self._known)
        if isinstance(other, int):
            return _Product(self._names, self._times * other, self._known)
        return super().__mul__(other)

    __rmul__ = __mul__


class _Watched(Mapping[str, Any]):
    """Symbols of which it is noted what is asked."""

    def __init__(self, values: Mapping[str, Any], numbers: dict[str, int], lanes: Mapping[Names, Lanes]) -> None:
        self._values, self._numbers, self._lanes = values, numbers, lanes

    def __getitem__(self, name: str) -> Any:
        value = self._values[name]
        if isinstance(value, np.ndarray):
            return _Product((name,), 1, self._lanes)
        self._numbers[name] = value
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)
