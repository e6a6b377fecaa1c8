"""Sizes over many batches as sums of a few arrays: tokens, tokens x sequence, what a rule of a kernel gives.

Of a run's symbols only a few differ from batch to batch, so most of its tensors are a number times one array. What a
phase holds at some moment then is a short row of numbers, one for each of these arrays: its atoms.
"""

from __future__ import annotations

from functools import reduce
from operator import mul
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memcalc.engine.lanes import Integers
from memcalc.engine.rules import Batches, Numbers, Rules, Symbols
from memcalc.estimation.allocation import BLOCK, rounded
from memcalc.estimation.program import Kind, Program

Bytes = npt.NDArray[np.float64]  # whole numbers: BLAS adds them up, and exactly so far below 2^53

# No size and no sum may be larger: below, float64 and int64 are exact. It is a petabyte on one GPU.
LARGEST = 2**50

SAMPLE = 16  # numbers of an array by which it is looked up

ONE = 0  # the atom of what is the same for all batches


Form = tuple[tuple[float, int], ...]  # numbers, each with its atom: a sum


class TooLarge(Exception):
    """A size is beyond `LARGEST`."""


class Sizes(NamedTuple):
    """Of each distinct size of a program: how often it has each atom. [sizes, atoms]"""

    exact: Bytes
    rounded: Bytes


class Atoms:
    """The arrays that sizes are made of, and how they are made.

    Args:
        symbols: of the run, over all batches of its context.
        lanes: which of these batches.
        rules: of workspaces, over all batches.
    """

    def __init__(self, symbols: Symbols, lanes: Numbers | slice, rules: Rules) -> None:
        self.batches = Batches._make(each[lanes] for each in symbols.batches)
        self.count = len(self.batches.micro_batch_size)
        self._symbols, self._lanes = symbols, lanes
        self._rules = rules
        self._rows: list[Bytes] = []
        self._largest: list[int] = []
        self._numbers: dict[object, int] = {}
        self._arrays: dict[tuple[float, ...], list[int]] = {}  # by some of what they hold
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
            self._rows = list(self._table)  # which are not kept twice
        return self._table

    def never_zero(self, lanes: slice) -> npt.NDArray[np.bool_]:
        """Which of them are zero for none of some batches. [atoms]"""
        key = ("never zero", len(self), lanes.start, lanes.stop)
        if key not in self.kept:
            self.kept[key] = self.table[:, lanes].all(axis=1)
        found: npt.NDArray[np.bool_] = self.kept[key]
        return found

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
            found = self._rules.bytes(kind, self._symbols)
            if isinstance(found, int):
                return (self.of(found),), (self.of(rounded(found)),)
            exact, block = found.of(self._lanes)
            return (self.of(exact),), (self.of(block),)
        number = kind.item_bytes
        varied: list[str] = []
        for axis in kind.axes:
            value = self._symbols.values[axis]
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
            factors = [self._symbols.values[axis][self._lanes] for axis in axes]  # type: ignore[index] # they vary
            self._checked(reduce(mul, (int(factor.max()) for factor in factors)))
            self._add(axes, reduce(mul, factors))
        return self._numbers[axes]

    def _array(self, size: Integers) -> int:
        row = size.astype(np.float64)
        for known in self._arrays.get(_sample(row), ()):
            if np.array_equal(self._rows[known], row):
                return known
        self._checked(int(row.max()))
        return self._add(len(self._rows), row)

    def _add(self, key: object, row: Any) -> int:
        number = self._numbers[key] = len(self._rows)
        self._rows.append(np.asarray(row, dtype=np.float64))
        self._arrays.setdefault(_sample(self._rows[number]), []).append(number)
        self._largest.append(int(self._rows[number].max()))
        return number

    @staticmethod
    def _checked(size: int) -> int:
        if size > LARGEST:
            raise TooLarge
        return size


def fitted(table: Bytes, width: int) -> Bytes:
    """A table that was made when there were fewer atoms. [..., width]"""
    missing = width - table.shape[-1]
    return np.concatenate([table, np.zeros((*table.shape[:-1], missing))], axis=-1) if missing else table


def _sample(row: Bytes) -> tuple[float, ...]:
    """Some of what it holds, by which most arrays can be told apart."""
    return tuple(row[:: max(len(row) // SAMPLE, 1)].tolist())
