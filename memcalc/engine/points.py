"""The configurations of a grid, loaded: one by one, or once for all that differ in their batches alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memcalc.engine.grid import Axis, Grid, Value, assignments
from memcalc.engine.lanes import elementwise
from memcalc.engine.reading import BATCH, Reader, changed
from memcalc.engine.terms import TermsList
from memcalc.errors import InputError
from memcalc.estimation.outside import outside_bytes
from memcalc.importers.loading import import_file, load, opened
from memcalc.spec.broken import Broken
from memcalc.spec.cards import find_card
from memcalc.spec.inference_rules import of_training
from memcalc.spec.loading import Opened, load_opened, load_parallelism, mapping_of
from memcalc.spec.overrides import parse_overrides, refuse_two_cards
from memcalc.spec.reading import read_source
from memcalc.spec.rules import RULES, Rule
from memcalc.spec.spec import Spec
from memcalc.spec.training import ParallelismSpec
from memcalc.spec.yaml_source import Path as Place

Source = Spec | str | Path | Mapping[str, Any]

Numbers = npt.NDArray[np.int64]

MOST_CONTEXTS = 16384  # that are kept


class Context(NamedTuple):
    """Configurations that differ in their batches alone.

    Args:
        spec: one of them; its rules were not asked.
        batch: the values of each field of `BATCH`.
        valid: whether the rules hold. [micro_batch_size, sequence_length, gradient_accumulation_steps]
        outside: bytes outside the allocator, and those that a process can use of the card; -1: none was named. [2]
        terms: numbers of `Points.terms`; an array as `valid` where they differ from batch to batch.
    """

    spec: Spec
    batch: tuple[tuple[int, ...], ...]
    valid: npt.NDArray[np.bool_]
    outside: Numbers
    terms: int | Numbers


class Points:
    """The configurations of a grid.

    Attributes:
        rules: those that every configuration is asked for; the last one is of nodes, which loading does not know.
        terms: by which configurations that were met are judged.

    Raises:
        InputError: the source cannot be read, an override cannot be understood, or there is no such card.
    """

    def __init__(
        self, source: Source, grid: Grid, overrides: tuple[str, ...], gpu: str | None, gpus_per_node: int | None
    ) -> None:
        self.grid = grid
        self.rules: tuple[Rule, ...] = (*RULES, partial(_in_node, gpus_per_node))
        self._overrides, self._gpu = overrides, gpu
        changes = self._changes = parse_overrides(overrides)
        _refuse_twice(grid, changes, gpu)
        refuse_two_cards(gpu, changes)
        if gpu is not None:
            find_card(gpu)
        self._source = source if isinstance(source, Spec | Mapping) else _read(source, overrides)
        tied = ("training", "global_batch_size") in changes or "training.global_batch_size" in grid.fields
        self._tied = tied or self._ties_batches()
        self.inner = {} if self._tied else _inner(grid.axes)
        self.terms = TermsList()
        self._opened: Opened | None = None
        self._known: dict[str, dict[Place, Any]] = {}  # by the words of an assignment
        self._forget()

    def _forget(self) -> None:
        self._reader = Reader()
        self._runs: dict[tuple[str, ...], Spec] = {}  # by the words that are not of parallelism
        self._parallelisms: dict[object, ParallelismSpec] = {}
        self._lanes: dict[object, dict[str, Numbers]] = {}  # by their batches
        self._questions: dict[object, list[tuple[object, Callable[[Spec], int | Numbers]]]] = {}  # likewise
        self._contexts: dict[tuple[object, ...], Context | None] = {}

    def spec(self, number: int) -> Spec:
        """One configuration.

        Raises:
            InputError: it cannot be.
        """
        words = (*self._overrides, *assignments(self.grid.point(number)))
        spec = of_training(load(self._source, words, gpu=self._gpu), "sweep")
        for broken in self.rules[-1](spec):
            raise InputError(broken.problem, broken.remedy, ".".join(map(str, broken.key)))
        return spec

    def context(self, outer: dict[str, Any], batch: dict[str, tuple[int, ...]]) -> Context | None:
        """The configurations of some values of the outer fields and all of some batches; None where there are none.

        Args:
            outer: a value for each field that is not of `inner`.
            batch: values of each field of `inner`, by its bare name.
        """
        key = (tuple(map(repr, outer.values())), tuple(batch.items()))
        if key not in self._contexts:
            if len(self._contexts) >= MOST_CONTEXTS:
                self._forget()
            self._contexts[key] = self._load(outer, batch)
        return self._contexts[key]

    def _load(self, outer: dict[str, Any], batch: dict[str, tuple[int, ...]]) -> Context | None:
        first = {f"training.{field}": values[0] for field, values in batch.items()}
        try:
            spec = of_training(self.loaded({**outer, **first}), "sweep")
            card = None if spec.hardware.gpu is None else find_card(spec.hardware.gpu)
        except InputError:
            return None
        values = tuple(batch.get(field, (getattr(spec.training, field),)) for field in BATCH)
        valid = self._valid(spec, values)
        if not valid.any():
            return None
        outside = np.array([outside_bytes(spec, card), -1 if card is None else card.usable_bytes])
        lanes = self._lanes[values]
        key = ("terms", spec.origin.limits, id(lanes))
        terms = self._reader.find(key, spec, partial(self.terms.numbers, lanes))
        numbers = terms if isinstance(terms, int) else terms.reshape(valid.shape)
        return Context(spec, values, valid, outside.reshape(2, 1, 1, 1), numbers)

    def _valid(self, spec: Spec, batch: tuple[tuple[int, ...], ...]) -> npt.NDArray[np.bool_]:
        """Whether the rules hold, each of which is asked once for all runs that agree in what it reads."""
        self._reader.meet((spec,))
        if batch not in self._questions:
            mesh = np.meshgrid(*(np.array(each, dtype=np.int64) for each in batch), indexing="ij")
            lanes = self._lanes[batch] = {field: array.ravel() for field, array in zip(BATCH, mesh, strict=True)}
            self._questions[batch] = [
                ((rule, len(self._questions)), partial(_broken, rule, lanes)) for rule in self.rules
            ]
        valid = np.ones(tuple(map(len, batch)), dtype=np.bool_)
        for key, broken in self._questions[batch]:
            found = self._reader.find(key, spec, broken)
            if not isinstance(found, int) or found:
                valid &= np.broadcast_to(np.equal(found, 0), valid.size).reshape(valid.shape)
        return valid

    def loaded(self, values: dict[str, Value]) -> Spec:
        """The run with these values, not asked for its rules; blocks that were loaded before are not loaded again.

        Raises:
            InputError: it cannot be.
        """
        if self._opened is None:
            self._opened = opened(self._source, (*self._overrides, *(f"{field}=null" for field in self.grid.fields)))
        words = assignments(values)
        spread = tuple([word for word in words if word.startswith("parallelism.")])
        # Offload decides a default of training.
        rest = tuple([word for word in words if word not in spread or word.startswith("parallelism.offload=")])
        if self._tied or rest not in self._runs:
            spec = self._runs[rest] = load_opened(self._opened, self._parsed(words), gpu=self._gpu, check=_unchecked)
            return spec
        run = self._runs[rest]
        key = (spread, run.training.implementation)
        if key not in self._parallelisms:
            self._parallelisms[key] = load_parallelism(self._opened, self._parsed(spread), run.training)
        return run.model_copy(update={"parallelism": self._parallelisms[key]})

    def _parsed(self, words: Iterable[str]) -> dict[Place, Any]:
        """The values of overrides and of these assignments."""
        changes = {**self._changes}
        for word in words:
            if word not in self._known:
                self._known[word] = parse_overrides((word,))
            changes |= self._known[word]
        return changes

    def _ties_batches(self) -> bool:
        """Whether the source ties micro-batch, accumulation and data parallelism together."""
        if isinstance(self._source, Spec):
            return self._source.training.global_batch_size is not None
        if isinstance(self._source, Mapping):
            training = self._source.get("training")
            return isinstance(training, Mapping) and training.get("global_batch_size") is not None
        try:
            return load(self._source, self._overrides, check=_unchecked).training.global_batch_size is not None
        except InputError:
            return True


def _refuse_twice(grid: Grid, changes: Mapping[Place, Any], gpu: str | None) -> None:
    """A field that is varied and given as well."""
    given = {".".join(map(str, path)): "--set" for path in changes} | ({} if gpu is None else {"hardware.gpu": "--gpu"})
    for field in grid.fields:
        if field in given:
            name = field.rpartition(".")[2]
            raise InputError(f"{name} is varied, and given as well.", "Keep one of the two.", given[field])


def _read(source: str | Path, overrides: tuple[str, ...]) -> Source:
    """The source itself; our own configuration on standard input as a mapping."""
    if import_file(source, overrides) is not None:
        return source
    read = read_source(source)  # what cannot be read is no matter of single configurations
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


def _broken(rule: Rule, lanes: dict[str, Numbers], run: Spec) -> int | Numbers:
    """Whether a rule is broken, for each of some batches."""
    return elementwise(lambda some: {"": int(any(True for _ in rule(changed(run, **some))))}, lanes)[""]


def _unchecked(spec: Spec, source: object) -> None:
    """Ask no rule."""


def _inner(axes: tuple[Axis, ...]) -> dict[int, str]:
    """The axes of batches: fields of `BATCH` that vary alone over whole numbers, by the number of the axis."""
    found: dict[int, str] = {}
    for number, axis in enumerate(axes):
        block, _, field = axis.fields[0].partition(".")
        whole = all(type(value) is int and 0 < value < 2**31 for (value, *_) in axis.values)
        if len(axis.fields) == 1 and block == "training" and field in BATCH and whole:
            found[number] = field
    return found
