"""Grid in, Table out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import numpy as np

from memcalc.errors import InputError
from memcalc.estimation.items import EVALUATED, PHASES
from memcalc.estimation.outside import outside_bytes
from memcalc.estimation.stages import stages_that_matter
from memcalc.progress import Progress, silent
from memcalc.spec.cards import find_card
from memcalc.spec.foreign import refuse_foreign
from memcalc.spec.spec import Spec
from memcalc.sweeping.arrays import BATCH, COMPONENTS, Matrix, Sizers, StageSums, changed
from memcalc.sweeping.contexts import Codes, Contexts, Source
from memcalc.sweeping.grid import Grid, Value
from memcalc.sweeping.lanes import Numbers, pieces
from memcalc.sweeping.reasons import NOT_MODELLED, VALID, Reasons
from memcalc.sweeping.table import Allocated, Judgement, Table
from memcalc.sweeping.terms import DOES_NOT_FIT, UNJUDGED, TermsList, judged

Array = np.ndarray[Any, Any]
Axes = Mapping[Any, Iterable[Value]]  # Any: mappings of names and of tuples of names alike

BLOCK = 1_048_576  # configurations that are in memory at a time, a quarter of a kilobyte each
AT_ONCE = 8192  # batches that are sized at a time: their arrays stay in the processor's cache
LARGEST = 2**50  # bytes: of more, sums of float64 may not be exact


def evaluate(
    source: Source,
    axes: Axes | Grid,
    *overrides: str,
    gpu: str | None = None,
    gpus_per_node: int | None = None,
    ledger: bool = False,
    progress: Progress = silent,
) -> Table:
    """Every configuration of a grid, sized as `memcalc.estimate(source, *overrides, ..., gpu=gpu)` sizes it.

    An invalid configuration is no error: `Table.valid` says which is, `Table.reason` why.

    Args:
        source: as for `memcalc.load`.
        axes: the values of each field, or a Grid: see there.
        overrides: "field=value", applied to all of them.
        gpu: the card to judge by.
        gpus_per_node: refuse what splits tensors over more ranks than a node has.
        ledger: also keep bytes by phase and component: a kilobyte a configuration.
        progress: called with how many of the runs are done that differ in more than their batches.

    Raises:
        InputError: the source cannot be read, a field is unknown, or the card is.
    """
    grid = axes if isinstance(axes, Grid) else Grid(axes)
    contexts = Contexts(source, grid, overrides, gpu, gpus_per_node)
    return _Evaluation(contexts, ledger=ledger).table(0, tuple(map(range, grid.shape)), progress)


def blocks(
    source: Source,
    axes: Axes | Grid,
    *overrides: str,
    gpu: str | None = None,
    gpus_per_node: int | None = None,
    ledger: bool = False,
    size: int = BLOCK,
) -> Iterator[Table]:
    """The same in blocks of at most `size` configurations, one after the other, so that memory stays bounded."""
    grid = axes if isinstance(axes, Grid) else Grid(axes)
    evaluation = _Evaluation(Contexts(source, grid, overrides, gpu, gpus_per_node), ledger=ledger)
    for start, ranges in _slabs(grid.shape, size):
        yield evaluation.table(start, ranges)


def _slabs(shape: tuple[int, ...], size: int) -> Iterator[tuple[int, tuple[range, ...]]]:
    """The grid in boxes of neighbours: the number of the first configuration, and the steps of each axis."""
    split = 0  # the axis that is cut; those before it take one value at a time, those behind it all
    while split < len(shape) - 1 and prod(shape[split + 1 :]) > size:
        split += 1
    behind = prod(shape[split + 1 :])
    step, start = max(size // behind, 1), 0
    for leading in np.ndindex(*shape[:split]):
        for first in range(0, shape[split], step):
            cut = range(first, min(first + step, shape[split]))
            yield start, (*(range(n, n + 1) for n in leading), cut, *map(range, shape[split + 1 :]))
            start += len(cut) * behind


class _Sums(NamedTuple):
    """Results of batches, those of the rank that needs most.

    Args:
        stage: its pipeline stage. [n]
        phases: bytes at the peak of each phase. [phases, n]
        components: bytes by component at the peak. [components, n]
        ledger: bytes by phase and component, if asked for. [phases, components, n]
    """

    stage: Any
    phases: Matrix
    components: Matrix
    ledger: Matrix | None


@dataclass(frozen=True, slots=True)
class _Columns:
    """Results in the making, those of a context next to each other. [..., *outer axes, *axes of batches]

    Args:
        codes: see `Reasons`.
        terms: numbers of the terms by which each is judged.
        outside: bytes outside the allocator.
        usable: bytes of the card; -1: none was named.
        stage: the pipeline stage that needs most.
        phases: bytes at the peak of each phase.
        components: bytes by component at the peak.
        ledger: bytes by phase and component, if asked for.
    """

    codes: Codes
    terms: Array
    outside: Array
    usable: Array
    stage: Array
    phases: Array
    components: Array
    ledger: Array | None

    @classmethod
    def zeros(cls, shape: tuple[int, ...], *, ledger: bool) -> _Columns:
        """For so many values of each axis."""

        def column(*before: int, dtype: Any = np.int64) -> Array:
            return np.zeros((*before, *shape), dtype=dtype)

        both = column(len(EVALUATED), len(COMPONENTS)) if ledger else None
        codes, terms = column(dtype=np.int16), column(dtype=np.int32)
        phases, components = column(len(EVALUATED)), column(len(COMPONENTS))
        return cls(codes, terms, column(), column(), column(), phases, components, both)

    def _each(self, function: Callable[[Array, int], Array]) -> _Columns:
        """What a function makes of each array, given how many of its axes are not the grid's."""
        axes = self.codes.ndim
        arrays = ((name, getattr(self, name)) for name in self.__dataclass_fields__)
        return replace(self, **{name: function(each, each.ndim - axes) for name, each in arrays if each is not None})

    def of(self, steps: tuple[int, ...]) -> _Columns:
        """Those of the context at some steps of the outer axes, as views. [..., n]"""

        def part(array: Array, before: int) -> Array:
            place: Any = (*(slice(None),) * before, *steps, ...)
            own: Array = array[place]
            return own.reshape(*own.shape[:before], -1)

        return self._each(part)

    def in_order(self, axes: list[int]) -> _Columns:
        """The same in the order of the grid. [..., n]

        Args:
            axes: the numbers of the axes, in the order in which they are here.
        """

        def ordered(array: Array, before: int) -> Array:
            for row in array.reshape(-1, *array.shape[before:]) if axes != sorted(axes) else ():
                row[:] = row.transpose(np.argsort(axes)).reshape(row.shape)  # one by one: there is no second table
            return array.reshape(*array.shape[:before], -1)

        return self._each(ordered)

    def write(self, cells: Any, sums: _Sums | None) -> None:
        """Keep the results of some batches of a context."""
        if sums is None:
            self.codes[cells] = NOT_MODELLED
            return
        self.stage[cells] = sums.stage
        self.phases[:, cells] = np.minimum(sums.phases, 2 * LARGEST)  # what is more is not exact, nor an int64 at last
        self.components[:, cells] = np.minimum(sums.components, 2 * LARGEST)
        if self.ledger is not None and sums.ledger is not None:
            self.ledger[:, :, cells] = np.minimum(sums.ledger, 2 * LARGEST)


class _Evaluation:
    """The configurations of a grid, sized context by context.

    Args:
        contexts: the grid's.
        ledger: also keep bytes by phase and component.
    """

    def __init__(self, contexts: Contexts, *, ledger: bool) -> None:
        self._contexts, self._ledger = contexts, ledger
        self._sizers, self._terms = Sizers(), TermsList()
        self._phases = PHASES

    def table(self, start: int, ranges: tuple[range, ...], progress: Progress = silent) -> Table:
        """The configurations of a box of the grid.

        Args:
            start: the number of the first one.
            ranges: steps of each axis.
            progress: called with the number of contexts that are done.
        """
        contexts, axes = self._contexts, self._contexts.grid.axes
        batch = {
            field: np.array([axes[number].values[step][0] for step in ranges[number]], dtype=np.float64)
            for number, field in contexts.inner.items()
        }
        mesh = np.meshgrid(*batch.values(), indexing="ij")
        batches = {field: values.ravel() for field, values in zip(batch, mesh, strict=True)}
        outer = tuple(len(ranges[number]) for number in contexts.outer)
        columns = _Columns.zeros((*outer, *map(len, batch.values())), ledger=self._ledger)
        for done, steps in enumerate(np.ndindex(*outer)):
            progress("sizing", done, prod(outer))
            values: dict[str, Value] = {f"training.{field}": int(each[0]) for field, each in batch.items()}
            for number, step in zip(contexts.outer, steps, strict=True):
                values |= dict(zip(axes[number].fields, axes[number].values[ranges[number][step]], strict=True))
            self._size(columns.of(steps), values, batches)
        return self._finished(columns.in_order([*contexts.outer, *contexts.inner]), start)

    def _size(self, found: _Columns, values: Mapping[str, Value], varied: Mapping[str, Numbers]) -> None:
        """Size the batches of one context and write them to its columns."""
        try:
            spec = self._contexts.loaded(values)
            card = None if spec.hardware.gpu is None else find_card(spec.hardware.gpu)
        except InputError:
            found.codes[:] = NOT_MODELLED
            return
        given = {field: np.full(found.codes.size, getattr(spec.training, field), dtype=np.float64) for field in BATCH}
        batches = {**given, **varied}
        found.codes[:] = self._contexts.first_broken(spec, batches)
        valid = np.flatnonzero(found.codes == 0)
        if not len(valid):
            return
        found.outside[:] = outside_bytes(spec, card)
        found.usable[:] = -1 if card is None else card.usable_bytes
        found.terms[:] = self._terms.numbers(batches, spec)
        if spec.training.evaluation_batch_size is not None:
            self._phases = EVALUATED
        for first in range(0, len(valid), AT_ONCE):
            cells = valid[first : first + AT_ONCE]
            own = {field: each[cells] for field, each in batches.items()}
            for where, sums in pieces(lambda some: self._sums(changed(spec, **some)), own):
                found.write(cells[where], sums)

    def _sums(self, run: Spec) -> _Sums | None:
        """The results of a run with `Lanes`; None: it is not modelled."""
        count = len(getattr(run.training, BATCH[0]).values)
        try:
            refuse_foreign(run)
            card = None if run.hardware.gpu is None else find_card(run.hardware.gpu)
            stages = [StageSums(run, stage, card, self._sizers, count) for stage in stages_that_matter(run)]
        except InputError:
            return None
        cells = np.arange(count)
        totals = np.array([stage.totals for stage in stages])  # [stages, phases, n]
        worst = totals.max(axis=1).argmax(axis=0)
        phases = totals[worst, :, cells].T
        peak = phases.argmax(axis=0)
        components = np.empty((len(COMPONENTS), count))
        ledger = np.empty((len(EVALUATED), len(COMPONENTS), count)) if self._ledger else None
        for number, stage in enumerate(stages):
            for phase in range(len(EVALUATED)):
                own = np.flatnonzero(worst == number)
                at_peak = own[peak[own] == phase]
                if len(at_peak):
                    components[:, at_peak] = stage.components(phase, at_peak)
                if ledger is not None and len(own):
                    ledger[phase][:, own] = stage.components(phase, own)
        return _Sums(np.array([stage.index for stage in stages])[worst], phases, components, ledger)

    def _finished(self, found: _Columns, start: int) -> Table:
        """The table of all columns."""
        phases = found.phases[: len(self._phases)]
        peak = phases.max(axis=0)
        too_large = (found.codes == VALID) & (peak > LARGEST)
        valid = (found.codes == VALID) & ~too_large
        large = too_large & (found.usable >= 0)
        for column in (peak, found.stage, found.outside, found.usable, *phases, *found.components):
            column[~valid] = 0
        if found.ledger is not None:
            found.ledger[:, :, ~valid] = 0
        allocated = Allocated(
            self._phases,
            peak,
            phases.argmax(axis=0),
            found.stage,
            phases.T,
            found.components.T,
            None if found.ledger is None else found.ledger[: len(self._phases)].transpose(2, 0, 1),
        )
        reserved, verdict = judged(peak, found.outside, found.usable, found.terms, self._terms.terms)
        verdict[~valid] = UNJUDGED
        verdict[large] = DOES_NOT_FIT
        judgement = Judgement(
            reserved,
            reserved + found.outside,
            found.usable,
            verdict,
            np.zeros(len(valid), dtype=np.bool_),
            found.terms,
            self._terms.terms,
        )
        return Table(
            self._contexts.grid,
            start,
            valid,
            too_large,
            allocated,
            judgement,
            Reasons(self._contexts, found.codes, start),
        )
