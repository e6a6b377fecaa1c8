"""The configurations of a grid, loaded: one by one, or once for all that differ in their batches alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from memcalc.errors import InputError
from memcalc.importers.loading import import_file, load, opened
from memcalc.spec.broken import Broken
from memcalc.spec.cards import find_card
from memcalc.spec.inference_rules import of_training
from memcalc.spec.loading import Opened, load_opened, mapping_of
from memcalc.spec.overrides import parse_overrides, refuse_two_cards
from memcalc.spec.reading import read_source
from memcalc.spec.rules import RULES, Rule
from memcalc.spec.spec import Spec
from memcalc.sweeping.arrays import BATCH, changed
from memcalc.sweeping.grid import Axis, Grid, Value, assignments
from memcalc.sweeping.lanes import Numbers, elementwise, pieces

Source = Spec | str | Path | Mapping[str, Any]
Codes = npt.NDArray[np.int16]

MOST_LARGE = 2**31  # of a batch: beyond it nothing is sized as an array


class Contexts:
    """The configurations of a grid, by contexts: those that differ in their batches alone.

    Args:
        source: as for `memcalc.load`.
        grid: the configurations.
        overrides: applied to all.
        gpu: the card to judge by.
        gpus_per_node: refuse tensor parallelism over more ranks than a node has.

    Attributes:
        inner: the axes of batches, by their numbers: which field of `BATCH` each is.
        outer: the numbers of the other axes.
        rules: what each configuration is asked; the last one is of nodes, which loading does not know.

    Raises:
        InputError: the source cannot be read, an override cannot be understood, or there is no such card.
    """

    def __init__(
        self, source: Source, grid: Grid, overrides: tuple[str, ...], gpu: str | None, gpus_per_node: int | None
    ) -> None:
        self.grid = grid
        self.rules: tuple[Rule, ...] = (*RULES, partial(_in_node, gpus_per_node))
        self._overrides, self._gpu, self._changes = overrides, gpu, parse_overrides(overrides)
        _refuse_twice(grid, self._changes, gpu)
        refuse_two_cards(gpu, self._changes)
        if gpu is not None:
            find_card(gpu)
        self._source = source if isinstance(source, Spec | Mapping) else _read(source, overrides)
        self._opened: Opened | None = None
        self.inner = {} if self._ties_batches() else _batch_axes(grid.axes)
        self.outer = [number for number in range(len(grid.axes)) if number not in self.inner]

    def spec(self, number: int) -> Spec:
        """One configuration.

        Raises:
            InputError: it is invalid.
        """
        words = (*self._overrides, *assignments(self.grid.point(number)))
        spec = of_training(load(self._source, words, gpu=self._gpu), "sweep")
        for broken in self.rules[-1](spec):
            raise InputError(broken.problem, broken.remedy, ".".join(map(str, broken.key)))
        return spec

    def loaded(self, values: Mapping[str, Value]) -> Spec:
        """The run with these values; its rules are not checked.

        Raises:
            InputError: a value is none of its field.
        """
        if self._opened is None:
            self._opened = opened(self._source, (*self._overrides, *(f"{field}=null" for field in self.grid.fields)))
        changes = {**self._changes, **parse_overrides(assignments(values))}
        return of_training(load_opened(self._opened, changes, gpu=self._gpu, check=_unchecked), "sweep")

    def first_broken(self, spec: Spec, batches: Mapping[str, Numbers]) -> Codes:
        """Return for each batch the number of the first rule that does not hold, from 1; 0: all do. [n]"""

        def first(some: dict[str, Any]) -> dict[str, int]:
            run = changed(spec, **some)
            return {"": next((number for number, rule in enumerate(self.rules, 1) for _ in rule(run)), 0)}

        count = len(next(iter(batches.values())))
        return np.broadcast_to(elementwise(first, batches)[""], count).astype(np.int16)

    def worded(self, spec: Spec, code: int, batches: Mapping[str, Numbers]) -> Iterator[tuple[Any, Broken]]:
        """Yield what a rule says of batches that break it; those of one message together."""
        rule = self.rules[code - 1]
        yield from pieces(lambda some: next(iter(rule(changed(spec, **some)))), batches)

    def _ties_batches(self) -> bool:
        """Whether micro-batch, accumulation and data parallelism follow from each other."""
        if ("training", "global_batch_size") in self._changes or "training.global_batch_size" in self.grid.fields:
            return True
        if isinstance(self._source, Mapping):
            training = self._source.get("training")
            return isinstance(training, Mapping) and training.get("global_batch_size") is not None
        if isinstance(self._source, Spec):
            return self._source.training.global_batch_size is not None
        try:
            return load(self._source, self._overrides, check=_unchecked).training.global_batch_size is not None
        except InputError:
            return True


def _refuse_twice(grid: Grid, changes: Mapping[Any, Any], gpu: str | None) -> None:
    """A field that is varied and given as well."""
    given = {".".join(map(str, path)): "--set" for path in changes} | ({} if gpu is None else {"hardware.gpu": "--gpu"})
    for field in grid.fields:
        if field in given:
            name = field.rpartition(".")[2]
            raise InputError(f"{name} is varied, and given as well.", "Keep one of the two.", given[field])


def _read(source: str | Path, overrides: tuple[str, ...]) -> Source:
    """The source itself; a configuration on standard input as a mapping, since it can be read once."""
    if import_file(source, overrides) is not None:
        return source
    read = read_source(source)  # what cannot be read is refused for all configurations at once
    return mapping_of(read) if str(source) == "-" else source


def _in_node(gpus: int | None, spec: Spec) -> list[Broken]:
    """The rule that tensor parallelism stays inside a node of so many GPUs, if it was asked for."""
    ranks = spec.parallelism.tensor_parallel
    if gpus is None or ranks <= gpus:
        return []
    return [
        Broken(
            ("parallelism", "tensor_parallel"),
            f"tensor_parallel = {ranks} is more than the {gpus} GPUs of a node.",
            "Its ranks exchange activations in every layer: keep them inside one node.",
        )
    ]


def _unchecked(spec: Spec, source: object) -> None:
    """Ask no rule."""


def _batch_axes(axes: tuple[Axis, ...]) -> dict[int, str]:
    """The axes of fields of `BATCH` that vary alone over whole numbers, by the number of the axis."""
    found: dict[int, str] = {}
    for number, axis in enumerate(axes):
        block, _, field = axis.fields[0].partition(".")
        whole = all(type(value) is int and 0 < value < MOST_LARGE for (value, *_) in axis.values)
        if len(axis.fields) == 1 and block == "training" and field in BATCH and whole:
            found[number] = field
    return found
