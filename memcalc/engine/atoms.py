"""Sizes over many batches as sums of a few arrays: tokens, tokens x sequence, what a rule of a kernel gives.

Of a run's symbols only a few differ from batch to batch, so most of its tensors are a number times one array. What a
phase holds at some moment then is a short row of numbers, one for each of these arrays: its atoms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from operator import mul
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memcalc.engine.lanes import Integers, elementwise
from memcalc.engine.reading import changed
from memcalc.estimation.allocation import BLOCK, rounded
from memcalc.estimation.program import Kind, Program
from memcalc.estimation.symbols import symbol_values
from memcalc.spec.cards import Card
from memcalc.spec.spec import Spec

Bytes = npt.NDArray[np.float64]  # whole numbers: BLAS adds them up, and exactly so far below 2^53

# No size and no sum may be larger: below, float64 and int64 are exact. It is a petabyte on one GPU.
LARGEST = 2**50

ONE = 0  # the atom of what is the same for all batches


Form = tuple[tuple[float, int], ...]  # numbers, each with its atom: a sum


class TooLarge(Exception):
    """A size is beyond `LARGEST`."""


class Batches(NamedTuple):
    """Micro-batch sizes and sequence lengths, one of each a configuration. [n]"""

    micro_batch_size: Integers
    sequence_length: Integers

    def on(self, spec: Spec) -> Spec:
        """The run with these arrays."""
        return changed(spec, **self._asdict())


class Sizes(NamedTuple):
    """Of each distinct size of a program: how often it has each atom. [sizes, atoms]"""

    exact: Bytes
    rounded: Bytes


class Rules:
    """Results of workspace rules, which many runs share: by the rule and the values that it asked for."""

    def __init__(self) -> None:
        self._known: dict[Kind, list[tuple[dict[str, Any], int | Integers]]] = {}

    def bytes(self, kind: Kind, values: Mapping[str, Any]) -> int | Integers:
        """The bytes of one kind of storage."""
        known = self._known.setdefault(kind, [])
        for asked, found in known:
            if all(_equal(values[name], value) for name, value in asked.items()):
                return found
        read: set[str] = set()
        arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
        found = elementwise(lambda lanes: {"": kind.bytes(_Watched({**values, **lanes}, read))}, arrays)[""]
        known.append(({name: values[name] for name in read}, found))
        return found


class Atoms:
    """The arrays that sizes are made of, and how they are made.

    Args:
        spec: the run, with any of the batches.
        card: the card.
        batches: all of them.
        rules: of workspaces.
    """

    def __init__(self, spec: Spec, card: Card | None, batches: Batches, rules: Rules) -> None:
        self.values = elementwise(lambda lanes: symbol_values(changed(spec, **lanes), card), batches._asdict())
        self.batches = batches
        self.count = len(batches.micro_batch_size)
        self._rules = rules
        self._rows: list[Bytes] = []
        self._largest: list[int] = []
        self._numbers: dict[object, int] = {}
        self._arrays: dict[bytes, int] = {}
        self._table: Bytes | None = None
        self._forms: dict[Program, list[tuple[Form, Form]]] = {}
        self._of_kind: dict[Kind, tuple[Form, Form]] = {}
        self._sizes: dict[Program, Sizes] = {}
        self.kept: dict[Any, Any] = {}  # what was found of phases before (moving.py)
        self._add((), np.ones(self.count))

    @property
    def table(self) -> Bytes:
        """The arrays. [atoms, n]"""
        if self._table is None or len(self._table) != len(self._rows):
            self._table = np.array(self._rows)
        return self._table

    def __len__(self) -> int:
        """How many there are."""
        return len(self._rows)

    def learn(self, program: Program) -> None:
        """Make sure that the program's sizes can be told.

        Raises:
            TooLarge: one is beyond what these arrays hold exactly.
        """
        if program not in self._forms:
            self._forms[program] = [self._form(kind) for kind in program.kinds]

    def sizes(self, program: Program) -> Sizes:
        """The sizes of a program that was learnt."""
        known = self._sizes.get(program)
        if known is None or known.exact.shape[1] != len(self):
            forms = self._forms[program]
            known = Sizes(np.zeros((len(forms), len(self))), np.zeros((len(forms), len(self))))
            for row, (exact, block) in enumerate(forms):
                for number, atom in exact:
                    known.exact[row, atom] += number
                for number, atom in block:
                    known.rounded[row, atom] += number
            self._sizes[program] = known
        return known

    def of(self, size: int | Integers) -> tuple[float, int]:
        """A size that was computed elsewhere, as a number times an atom."""
        if not isinstance(size, np.ndarray):
            return self._checked(size), ONE
        return 1, self._array(size)

    def _form(self, kind: Kind) -> tuple[Form, Form]:
        """A size, and what the allocator hands out for it."""
        if kind not in self._of_kind:
            self._of_kind[kind] = self._find_form(kind)
        return self._of_kind[kind]

    def _find_form(self, kind: Kind) -> tuple[Form, Form]:
        if kind.rule is not None:
            size = self._rules.bytes(kind, self.values)
            return (self.of(size),), (self.of(rounded(size)),)  # type: ignore[arg-type] # arrays add up as numbers do
        number = kind.item_bytes
        varied: list[str] = []
        for axis in kind.axes:
            value = self.values[axis]
            if isinstance(value, np.ndarray):
                varied.append(axis)
            else:
                number *= value
        if not varied:
            return ((self._checked(number), ONE),), ((self._checked(rounded(number)), ONE),)
        atom = self._product(tuple(sorted(varied)))
        self._checked(number * self._largest[atom])
        own = (number, atom)
        if number % BLOCK == 0:
            return (own,), (own,)
        if own not in self._numbers:  # what rounding adds, which is small
            exact = number * self._rows[atom].astype(np.int64)
            self._add(own, rounded(exact) - exact)  # type: ignore[arg-type] # as above
        return (own,), (own, (1, self._numbers[own]))

    def _product(self, axes: tuple[str, ...]) -> int:
        if axes not in self._numbers:
            largest = reduce(mul, (int(self.values[axis].max()) for axis in axes))  # type: ignore[union-attr]
            self._checked(largest)
            self._add(axes, reduce(mul, (self.values[axis] for axis in axes)))
        return self._numbers[axes]

    def _array(self, size: Integers) -> int:
        row = size.astype(np.float64)
        known = self._arrays.get(row.tobytes())
        if known is None:
            self._checked(int(size.max()))
            known = self._add(len(self._rows), row)
        return known

    def _add(self, key: object, row: Any) -> int:
        array = np.asarray(row, dtype=np.float64)
        self._arrays.setdefault(array.tobytes(), len(self._rows))
        self._numbers[key] = len(self._rows)
        self._rows.append(array)
        self._largest.append(int(row.max()))
        return self._numbers[key]

    @staticmethod
    def _checked(size: int) -> int:
        if size > LARGEST:
            raise TooLarge
        return size


def fitted(table: Bytes, width: int) -> Bytes:
    """A table that was made when there were fewer atoms. [..., width]"""
    missing = width - table.shape[-1]
    return np.concatenate([table, np.zeros((*table.shape[:-1], missing))], axis=-1) if missing else table


def _equal(one: Any, two: Any) -> bool:
    if isinstance(one, np.ndarray) and isinstance(two, np.ndarray):
        return one is two or np.array_equal(one, two)
    return not isinstance(one, np.ndarray) and not isinstance(two, np.ndarray) and bool(one == two)


class _Watched(Mapping[str, Any]):
    """Values that note which of them are asked for."""

    def __init__(self, values: Mapping[str, Any], read: set[str]) -> None:
        self._values, self._read = values, read

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)
