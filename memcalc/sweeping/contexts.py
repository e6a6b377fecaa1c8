"""Loading of a grid's configurations: one at a time, or once for all that differ only in their batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memcalc.errors import InputError
from memcalc.importers.loading import import_file, load, opened
from memcalc.spec.hardware.gpus import find_gpu
from memcalc.spec.loading import OpenedConfig, load_opened, mapping_of
from memcalc.spec.overrides import parse_overrides, reject_two_gpus
from memcalc.spec.reading import read_source
from memcalc.spec.rule_sets.inference import of_training
from memcalc.spec.rule_sets.run import RULES, Rule
from memcalc.spec.rule_sets.violations import Violation
from memcalc.spec.spec import Spec
from memcalc.sweeping.arrays import BATCH
from memcalc.sweeping.grid import Axis, Grid, Value, assignments
from memcalc.sweeping.vector_int import Indices, Numbers, elementwise, pieces
from memcalc.verdict.judge import fits_by_records, moved_bytes
from memcalc.verdict.other_candidates import other_candidates

Source = Spec | str | Path | Mapping[str, Any]
Codes = npt.NDArray[np.int16]
Flags = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]

MOST_LARGE = 2**31  # largest batch value: larger ones are not estimated as arrays


class LoadedBatches(NamedTuple):
    """A run, and the configurations of a context that differ from it only in their batch fields."""

    spec: Spec  # with the batch of the first of them
    cells: Indices  # positions of the configurations in their context. [m]
    # for each, whether another candidate of an open choice may not fit, and the bytes by which the smallest candidate
    # has a lower peak. [m]
    may_not_fit: bool | Flags
    moved_bytes: int | Integers


class Contexts:
    """The configurations of a grid, grouped by context: configurations of a context differ only in their batches.

    Args:
        source: as for `memcalc.load`.
        grid: the configurations.
        overrides: applied to all.
        gpu: the GPU to check against.
        gpus_per_node: reject tensor parallelism over more ranks than a node has.

    Attributes:
        inner: the batch axes: the field of `BATCH` by the axis's index.
        outer: indices of the other axes.
        rules: rules that each configuration is checked against; the last one is about nodes, which loading ignores.

    Raises:
        InputError: the source cannot be read, an override is invalid, or the GPU is unknown.
    """

    def __init__(
        self, source: Source, grid: Grid, overrides: tuple[str, ...], gpu: str | None, gpus_per_node: int | None
    ) -> None:
        self.grid = grid
        self.rules: tuple[Rule, ...] = (*RULES, partial(_in_node, gpus_per_node))
        self._overrides, self._gpu, self._changes = overrides, gpu, parse_overrides(overrides)
        _refuse_twice(grid, self._changes, gpu)
        reject_two_gpus(gpu, self._changes)
        if gpu is not None:
            find_gpu(gpu)
        self._source, self._is_imported = source, False
        if not isinstance(source, Spec | Mapping):
            self._source, self._is_imported = _read(source, overrides)
        self._opened: OpenedConfig | None = None
        self.inner = {} if self._has_open_choices() or self._ties_batches() else _batch_axes(grid.axes)
        self.outer = [number for number in range(len(grid.axes)) if number not in self.inner]

    def spec(self, number: int) -> Spec:
        """Return one configuration.

        Raises:
            InputError: the configuration is invalid.
        """
        words = (*self._overrides, *assignments(self.grid.point(number)))
        spec = of_training(load(self._source, words, gpu=self._gpu), "sweep")
        for violation in self.rules[-1](spec):
            raise InputError(violation.problem, violation.remedy, ".".join(map(str, violation.key)))
        return spec

    def loaded(self, values: Mapping[str, Value]) -> Spec:
        """Return the run with these values, without checking its rules.

        Raises:
            InputError: a value is invalid for its field.
        """
        words = assignments(values)
        if self._is_imported:
            run = load(self._source, (*self._overrides, *words), gpu=self._gpu, check=_unchecked)
            return of_training(run, "sweep")
        if self._opened is None:
            self._opened = opened(self._source, (*self._overrides, *(f"{field}=null" for field in self.grid.fields)))
        changes = {**self._changes, **parse_overrides(words)}
        return of_training(load_opened(self._opened, changes, gpu=self._gpu, check=_unchecked), "sweep")

    def runs(self, values: Mapping[str, Value], batches: Mapping[str, Numbers], count: int) -> Iterator[LoadedBatches]:
        """Yield the runs of one context, each with the batches for which it differs in nothing but the batch fields.

        What another framework's file means may depend on all values: transformers pads the sequences of a batch, but
        not a batch of one. So such a file is read once for each batch.

        Args:
            values: values of the context, and of the batch fields of its first configuration.
            batches: values of the batch fields that vary, for each configuration. [n]
            count: n.
        """
        if not self._is_imported:
            with suppress(InputError):
                run = self.loaded(values)
                yield LoadedBatches(run, np.arange(count), _may_not_fit(run), moved_bytes(run))
            return
        alike: dict[Any, list[tuple[int, Spec]]] = {}
        for cell in range(count):
            own = {field: int(each[cell]) for field, each in batches.items()}
            with suppress(InputError):
                run = self.loaded({**values, **{f"training.{field}": value for field, value in own.items()}})
                alike.setdefault(run.with_training(**dict.fromkeys(own, 1)).blocks, []).append((cell, run))
        for members in alike.values():
            cells = np.array([cell for cell, _ in members])
            may_not_fit = np.array([_may_not_fit(run) for _, run in members])
            yield LoadedBatches(members[0][1], cells, may_not_fit, np.array([moved_bytes(run) for _, run in members]))

    def first_violation(self, spec: Spec, batches: Mapping[str, Numbers]) -> Codes:
        """Return for each batch the number of the first violated rule, from 1; 0: none is violated. [n]"""

        def first(some: dict[str, Any]) -> dict[str, int]:
            run = spec.with_training(**some)
            return {"": next((number for number, rule in enumerate(self.rules, 1) for _ in rule(run)), 0)}

        count = len(next(iter(batches.values())))
        return np.broadcast_to(elementwise(first, batches)[""], count).astype(np.int16)

    def violations_by_message(
        self, spec: Spec, code: int, batches: Mapping[str, Numbers]
    ) -> Iterator[tuple[Any, Violation]]:
        """Yield the violations of a rule, each with the batches that share its message."""
        rule = self.rules[code - 1]
        yield from pieces(lambda some: next(iter(rule(spec.with_training(**some)))), batches)

    def _has_open_choices(self) -> bool:
        """Return whether the source is a loaded run of a file with open choices."""
        others = self._source.origin.others if isinstance(self._source, Spec) else None
        return others is not None and bool(others.specs)

    def _ties_batches(self) -> bool:
        """Return whether micro-batch size, accumulation steps and data parallelism determine each other."""
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


def _may_not_fit(spec: Spec) -> bool:
    """Return whether recorded runs do not suffice to say that all other candidates of open choices fit."""
    gpu = spec.gpu
    return gpu is not None and not all(fits_by_records(each, gpu.usable_bytes) for each in other_candidates(spec))


def _refuse_twice(grid: Grid, changes: Mapping[Any, Any], gpu: str | None) -> None:
    """Reject a field that is both varied and set."""
    given = {".".join(map(str, path)): "--set" for path in changes} | ({} if gpu is None else {"hardware.gpu": "--gpu"})
    for field in grid.fields:
        if field in given:
            name = field.rpartition(".")[2]
            raise InputError(f"{name} is both varied and set.", "Keep one of the two.", given[field])


def _read(source: str | Path, overrides: tuple[str, ...]) -> tuple[Source, bool]:
    """Return the source, and whether it is a file of another framework.

    Memcalc's own configuration from standard input, which can be read only once, is returned as a mapping.
    """
    if import_file(source, overrides) is not None:
        return source, True
    read = read_source(source)  # an unreadable source is an error of the whole grid
    return mapping_of(read) if str(source) == "-" else source, False


def _in_node(gpus: int | None, spec: Spec) -> list[Violation]:
    """Check that tensor parallelism stays inside a node of `gpus` GPUs; None: no limit."""
    ranks = spec.parallelism.tensor_parallel
    if gpus is None or ranks <= gpus:
        return []
    return [
        Violation(
            ("parallelism", "tensor_parallel"),
            f"tensor_parallel = {ranks} is more than the {gpus} GPUs of a node.",
            f"Set at most {gpus}: tensor-parallel ranks exchange activations in every layer.",
        )
    ]


def _unchecked(spec: Spec, source: object) -> None:
    """Skip validation."""


def _batch_axes(axes: tuple[Axis, ...]) -> dict[int, str]:
    """Return the axes that vary one field of `BATCH` alone over whole numbers: field by the axis's index."""
    found: dict[int, str] = {}
    for number, axis in enumerate(axes):
        block, _, field = axis.fields[0].partition(".")
        whole = all(type(value) is int and 0 < value < MOST_LARGE for (value, *_) in axis.values)
        if len(axis.fields) == 1 and block == "training" and field in BATCH and whole:
            found[number] = field
    return found
