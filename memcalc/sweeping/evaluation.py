"""Evaluation of a grid: Grid in, Table out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from memcalc.errors import InputError
from memcalc.estimation.outside_allocator import outside_bytes
from memcalc.layout.stages import stages_that_matter
from memcalc.ledger.row_drafts import ALL_PHASES, PHASES, run_phases
from memcalc.progress import Progress, silent
from memcalc.spec.model_families.transformers_fallback import reject_without_formulas
from memcalc.spec.spec import Spec
from memcalc.sweeping.arrays import BATCH, COMPONENTS, Matrix, Sizers, StageSums
from memcalc.sweeping.contexts import Codes, Contexts, Source
from memcalc.sweeping.grid import Grid, Value
from memcalc.sweeping.reasons import NOT_MODELLED, VALID, Reasons
from memcalc.sweeping.table import AllocatedPeaks, GridVerdicts, Table
from memcalc.sweeping.vector_int import Numbers, pieces
from memcalc.sweeping.verdict_terms import CLOSE, DOES_NOT_FIT, FITS, UNJUDGED, TermsList, of_each, verdicts

Array = np.ndarray[Any, Any]
Axes = Mapping[Any, Iterable[Value]]  # Any: mappings of names and of tuples of names

BLOCK = 1_048_576  # configurations in memory at a time, about 256 bytes each
AT_ONCE = 8192  # batches estimated at a time: their arrays stay in the processor's cache
LARGEST = 2**50  # bytes; sums of float64 beyond this may be inexact


def evaluate(
    source: Source,
    axes: Axes | Grid,
    *overrides: str,
    gpu: str | None = None,
    gpus_per_node: int | None = None,
    ledger: bool = False,
    progress: Progress = silent,
) -> Table:
    """Estimate every configuration of a grid as `memcalc.estimate(source, *overrides, ..., gpu=gpu)` does.

    An invalid configuration is no error: `Table.valid` marks it and `Table.reason` explains it.

    Args:
        source: as for `memcalc.load`.
        axes: the values of each field, or a Grid.
        overrides: "field=value", applied to all configurations.
        gpu: the GPU to check against.
        gpus_per_node: reject tensor parallelism over more ranks than a node has.
        ledger: also keep bytes by phase and component, about 1 kB per configuration.
        progress: called with the number of finished contexts (configurations that differ only in their batches).

    Raises:
        InputError: the source cannot be read, or a field or the GPU is unknown.
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
    """Yield the tables of `evaluate` in blocks of at most `size` configurations, to bound memory."""
    grid = axes if isinstance(axes, Grid) else Grid(axes)
    evaluation = _Evaluation(Contexts(source, grid, overrides, gpu, gpus_per_node), ledger=ledger)
    for start, ranges in _slabs(grid.shape, size):
        yield evaluation.table(start, ranges)


def _slabs(shape: tuple[int, ...], size: int) -> Iterator[tuple[int, tuple[range, ...]]]:
    """Yield boxes of adjacent configurations: the index of the first one, and the steps of each axis."""
    split = 0  # the axis that is split; earlier axes take one value at a time, later ones all
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
    """Results of batches on the rank with the highest peak."""

    stage: Any  # the rank's pipeline stage. [n]
    phases: Matrix  # bytes at the peak of each phase. [phases, n]
    components: Matrix  # bytes by component at the peak. [components, n]
    ledger: Matrix | None  # bytes by phase and component, if requested. [phases, components, n]


@dataclass(frozen=True, slots=True)
class _Columns:
    """Columns of results under construction, contiguous for each context. [..., *outer axes, *batch axes]"""

    codes: Codes  # see `Reasons`
    terms: Array  # index of the terms of each configuration
    outside: Array  # bytes outside the allocator
    usable: Array  # usable bytes of the GPU; -1: no GPU was given
    may_not_fit: Array  # whether another candidate of an open choice may not fit
    moved: Array  # bytes by which the smallest candidate of an open choice has a lower peak
    stage: Array  # the pipeline stage with the highest peak
    phases: Array  # bytes at the peak of each phase
    components: Array  # bytes by component at the peak
    ledger: Array | None  # bytes by phase and component, if requested

    @classmethod
    def zeros(cls, shape: tuple[int, ...], *, ledger: bool) -> _Columns:
        """Return columns of zeros for this number of values of each axis."""

        def column(*before: int, dtype: Any = np.int64) -> Array:
            return np.zeros((*before, *shape), dtype=dtype)

        both = column(len(ALL_PHASES), len(COMPONENTS)) if ledger else None
        codes, terms, may_not_fit = column(dtype=np.int16), column(dtype=np.int32), column(dtype=np.bool_)
        phases, components = column(len(ALL_PHASES)), column(len(COMPONENTS))
        return cls(codes, terms, column(), column(), may_not_fit, column(), column(), phases, components, both)

    def _each(self, function: Callable[[Array, int], Array]) -> _Columns:
        """Apply a function to each array; its second argument is the number of axes that do not belong to the grid."""
        axes = self.codes.ndim
        arrays = ((name, getattr(self, name)) for name in self.__dataclass_fields__)
        return replace(self, **{name: function(each, each.ndim - axes) for name, each in arrays if each is not None})

    def of(self, steps: tuple[int, ...]) -> _Columns:
        """Return views of the columns of one context, given by its steps on the outer axes. [..., n]"""

        def part(array: Array, before: int) -> Array:
            place: Any = (*(slice(None),) * before, *steps, ...)
            own: Array = array[place]
            return own.reshape(*own.shape[:before], -1)

        return self._each(part)

    def in_order(self, axes: list[int]) -> _Columns:
        """Return the columns in the order of the grid. [..., n]

        Args:
            axes: indices of the grid's axes, in their current order.
        """

        def ordered(array: Array, before: int) -> Array:
            for row in array.reshape(-1, *array.shape[before:]) if axes != sorted(axes) else ():
                row[:] = row.transpose(np.argsort(axes)).reshape(row.shape)  # in place: no second table in memory
            return array.reshape(*array.shape[:before], -1)

        return self._each(ordered)

    def write(self, cells: Any, sums: _Sums | None) -> None:
        """Store the results of some batches of a context."""
        if sums is None:
            self.codes[cells] = NOT_MODELLED
            return
        self.stage[cells] = sums.stage
        self.phases[:, cells] = np.minimum(sums.phases, 2 * LARGEST)  # beyond: inexact, and may overflow int64
        self.components[:, cells] = np.minimum(sums.components, 2 * LARGEST)
        if self.ledger is not None and sums.ledger is not None:
            self.ledger[:, :, cells] = np.minimum(sums.ledger, 2 * LARGEST)


class _Evaluation:
    """Estimates of a grid's configurations, one context at a time.

    Args:
        contexts: the contexts of the grid.
        ledger: also keep bytes by phase and component.
    """

    def __init__(self, contexts: Contexts, *, ledger: bool) -> None:
        self._contexts, self._ledger = contexts, ledger
        self._sizers, self._terms = Sizers(), TermsList()
        self._phases = PHASES

    def table(self, start: int, ranges: tuple[range, ...], progress: Progress = silent) -> Table:
        """Return the table of a box of the grid.

        Args:
            start: index of the first configuration.
            ranges: steps of each axis.
            progress: called with the number of finished contexts.
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
        """Estimate the batches of one context and write the results to its columns."""
        found.codes[:] = NOT_MODELLED
        for spec, cells, may_not_fit, moved in self._contexts.runs(values, varied, found.codes.size):
            given = {field: np.full(len(cells), getattr(spec.training, field), dtype=np.float64) for field in BATCH}
            batches = {**given, **{field: each[cells] for field, each in varied.items()}}
            try:
                gpu = spec.gpu
            except InputError:
                continue
            found.codes[cells] = self._contexts.first_violation(spec, batches)
            valid = np.flatnonzero(found.codes[cells] == VALID)
            if not len(valid):
                continue
            found.outside[cells] = outside_bytes(spec, gpu)
            found.usable[cells] = -1 if gpu is None else gpu.usable_bytes
            found.terms[cells] = self._terms.numbers(batches, spec)
            found.may_not_fit[cells], found.moved[cells] = may_not_fit, moved
            asked = run_phases(spec)
            self._phases = tuple(each for each in ALL_PHASES if each in self._phases or each in asked)
            for first in range(0, len(valid), AT_ONCE):
                some = valid[first : first + AT_ONCE]
                own = {field: each[some] for field, each in batches.items()}
                for where, sums in pieces(partial(self._sums, spec), own):
                    found.write(cells[some[where]], sums)

    def _sums(self, spec: Spec, batches: Mapping[str, Any]) -> _Sums | None:
        """Return the results of a run with arrays as its batch fields; None: the run is not modelled."""
        run = spec.with_training(**batches)
        count = len(getattr(run.training, BATCH[0]).values)
        try:
            reject_without_formulas(run)
            gpu = run.gpu
            stages = [StageSums(run, stage, gpu, self._sizers, count) for stage in stages_that_matter(run)]
        except InputError:
            return None
        cells = np.arange(count)
        totals = np.array([stage.totals for stage in stages])  # [stages, phases, n]
        worst = totals.max(axis=1).argmax(axis=0)
        phases = totals[worst, :, cells].T
        peak = phases.argmax(axis=0)
        components = np.empty((len(COMPONENTS), count))
        ledger = np.empty((len(ALL_PHASES), len(COMPONENTS), count)) if self._ledger else None
        for number, stage in enumerate(stages):
            for phase in range(len(ALL_PHASES)):
                own = np.flatnonzero(worst == number)
                at_peak = own[peak[own] == phase]
                if len(at_peak):
                    components[:, at_peak] = stage.components(phase, at_peak)
                if ledger is not None and len(own):
                    ledger[phase][:, own] = stage.components(phase, own)
        return _Sums(np.array([stage.index for stage in stages])[worst], phases, components, ledger)

    def _finished(self, found: _Columns, start: int) -> Table:
        """Return the table of the filled columns."""
        asked = [number for number, phase in enumerate(ALL_PHASES) if phase in self._phases]
        phases = found.phases[asked]
        peak = phases.max(axis=0)
        too_large = (found.codes == VALID) & (peak > LARGEST)
        valid = (found.codes == VALID) & ~too_large
        large = too_large & (found.usable >= 0)
        for column in (peak, found.stage, found.outside, found.usable, *phases, *found.components):
            column[~valid] = 0
        if found.ledger is not None:
            found.ledger[:, :, ~valid] = 0
        allocated = AllocatedPeaks(
            self._phases,
            peak,
            phases.argmax(axis=0),
            found.stage,
            phases.T,
            found.components.T,
            None if found.ledger is None else found.ledger[asked].transpose(2, 0, 1),
        )
        reserved, verdict = verdicts(peak, found.outside, found.usable, found.terms, self._terms.terms)
        verdict[(verdict == FITS) & found.may_not_fit] = CLOSE
        least_outside = found.outside - of_each([each.communication_range for each in self._terms.terms], found.terms)
        may_fit = (found.moved > 0) & (peak - found.moved + least_outside <= found.usable)
        verdict[(verdict == DOES_NOT_FIT) & may_fit] = CLOSE
        verdict[~valid] = UNJUDGED
        verdict[large] = DOES_NOT_FIT
        judgement = GridVerdicts(
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
