"""Peaks of one pipeline stage over many batches: bytes per phase, and the live tensors at the peak.

The blocks and the points of a step are those of a single estimate (`memcalc.phase_peaks.timeline`); sizes are
`VectorInt`. Where a single estimate picks the one largest candidate, every candidate that is largest for some batch is
kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memcalc.estimation.transient import persistent_items, rollouts, spans
from memcalc.layout.stages import Stage
from memcalc.layout.symbols import symbol_values
from memcalc.ledger.component import Component
from memcalc.ledger.row_drafts import ALL_PHASES, GENERATION, phases_of, run_phases
from memcalc.phase_peaks.peak_candidates import PeakCandidate
from memcalc.phase_peaks.timeline import StageTimeline
from memcalc.programs.program import Program, StorageSize, Stream
from memcalc.programs.sized_program import ProgramSizer, SizedProgram
from memcalc.spec.hardware.gpus import GpuSpec
from memcalc.spec.spec import Spec
from memcalc.states.model_states import state_sums
from memcalc.sweeping.vector_int import Indices, Numbers, VectorInt, elementwise, plain

Matrix = npt.NDArray[np.float64]

COMPONENTS = tuple(Component)
BATCH = ("micro_batch_size", "sequence_length")  # the fields that can be `VectorInt`

_ROUNDING = COMPONENTS.index(Component.BLOCK_ROUNDING)
_BLOCK = 512.0  # see memcalc.allocator.pytorch.block_sizes


def changed(spec: Spec, **training: Any) -> Spec:
    """Return the run with other values of fields of `training`, which may be `VectorInt`; nothing is validated."""
    return spec.model_copy(update={"training": spec.training.model_copy(update=training)})


class ArraySized(SizedProgram):
    """A block's program, sized for many batches.

    Args:
        program: the block.
        values: symbols; some are `VectorInt`.
        count: number of batches.
        rules: cached results of workspace rules.
    """

    def __init__(self, program: Program, values: Mapping[str, Any], count: int, rules: KindSizes) -> None:
        super().__init__(program, values)
        exact = [rules.bytes(storage_size, values) for storage_size in program.kinds]
        self.requested: Matrix = np.array([np.broadcast_to(size, count) for size in exact]).reshape(-1, count)
        self.blocks: Matrix = np.ceil(self.requested / _BLOCK) * _BLOCK
        self._amounts: dict[tuple[int, ...], VectorInt] = {}
        self._tops: dict[object, tuple[int, ...]] = {}

    def bytes_of(self, storages: tuple[int, ...]) -> Any:
        """Return the rounded bytes of some storages together."""
        if storages not in self._amounts:
            self._amounts[storages] = VectorInt(_counts(self.program, ((each, 1) for each in storages)) @ self.blocks)
        return self._amounts[storages]

    def highest(self, stream: Stream, since: int = 0) -> tuple[int, ...]:
        """Return the positions of a stream that are its peak for some batch, at event `since` or later."""
        return self._highest(stream, _local_tops(self.program, stream, since))

    def highest_among(self, stream: Stream, positions: frozenset[int]) -> tuple[int, ...]:
        """Return those of the given positions of a stream that are the peak for some batch."""
        return self._highest(stream, tuple(sorted(positions)))

    def _highest(self, stream: Stream, positions: tuple[int, ...]) -> tuple[int, ...]:
        key = stream, positions
        if key not in self._tops:
            heights = _heights(self.program, stream)[list(positions)] @ self.blocks
            self._tops[key] = tuple(positions[index] for index in _each_once(heights.argmax(axis=0)))
        return self._tops[key]

    def add_components(self, found: Matrix, storages: Iterable[tuple[int, int]], cells: Indices) -> None:
        """Add the bytes of some storages by component.

        Args:
            found: bytes by component. [components, cells]
            storages: each with its count.
            cells: indices of the batches.
        """
        by_component: dict[Component, list[tuple[int, int]]] = {}
        for storage, count in storages:
            by_component.setdefault(self.program.labels[storage][0], []).append((storage, count))
        for component, several in by_component.items():
            counts = _counts(self.program, several)
            requested = counts @ self.requested[:, cells]
            found[COMPONENTS.index(component)] += requested
            found[_ROUNDING] += counts @ self.blocks[:, cells] - requested


def _counts(program: Program, storages: Iterable[tuple[int, int]]) -> Numbers:
    """Return how many of some storages have each of the program's sizes; storages come with their counts. [kinds]"""
    found = np.zeros(len(program.kinds))
    for storage, count in storages:
        found[program.kind_of[storage]] += count
    return found


def _each_once(numbers: Indices) -> list[int]:
    return np.flatnonzero(np.bincount(numbers)).tolist()


def _heights(program: Program, stream: Stream) -> Matrix:
    """Return the change in live storages of each size since the stream began, per event. [events + 1, kinds]"""
    key = "heights", stream
    if key not in program.findings:
        events = program.stream(stream)
        found = np.zeros((len(events) + 1, len(program.kinds)))
        for position, event in enumerate(events, 1):
            found[position, program.kind_of[event.storage]] = event.sign
        program.findings[key] = found.cumsum(axis=0)
    return program.findings[key]  # type: ignore[no-any-return]


def _local_tops(program: Program, stream: Stream, since: int) -> tuple[int, ...]:
    """Return the positions from `since` on where a storage is allocated and the next event frees one; or the start."""
    key = "tops", stream, since
    if key not in program.findings:
        signs = pairwise([*(event.sign for event in program.stream(stream)), -1])
        tops = tuple(at for at, (sign, after) in enumerate(signs, 1) if at >= since and sign > after)
        program.findings[key] = tops if since and tops else (since, *tops)
    return program.findings[key]  # type: ignore[no-any-return]


class KindSizes:
    """Sizes of storage kinds, computed once for all runs that agree in the symbols that a kind reads."""

    def __init__(self) -> None:
        self._known: dict[StorageSize, list[tuple[dict[str, Any], Any]]] = {}

    def bytes(self, storage_size: StorageSize, values: Mapping[str, Any]) -> Any:
        """Return the bytes of one storage for each batch; a single number if they are equal for all."""
        if storage_size.rule is None:
            return plain(storage_size.bytes(values))
        several = self._known.setdefault(storage_size, [])
        for read, found in several:
            if all(_same(values[name], value) for name, value in read.items()):
                return found
        watched = _ReadSymbols(values)
        lanes = {name: value.values for name, value in values.items() if isinstance(value, VectorInt)}
        found = elementwise(lambda some: {"": storage_size.bytes(watched.with_values(some))}, lanes)[""]
        several.append((watched.read, found))
        return found


def _same(one: Any, other: Any) -> bool:
    """Return whether two numbers, or two arrays of numbers, are equal."""
    if isinstance(one, VectorInt) and isinstance(other, VectorInt):
        return one is other or np.array_equal(one.values, other.values)
    return not isinstance(one, VectorInt) and not isinstance(other, VectorInt) and bool(one == other)


class _ReadSymbols(dict[str, Any]):
    """Symbols that record which of them are read: a rule that reads equal symbols returns an equal result."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.read: dict[str, Any] = {}
        self._whole = values

    def __getitem__(self, name: str) -> Any:
        self.read.setdefault(name, self._whole[name])
        return super().__getitem__(name)

    def with_values(self, values: Mapping[str, Any]) -> _ReadSymbols:
        """Return the same object with other values of some symbols."""
        self.update(values)
        return self


class ArraySizer(ProgramSizer):
    """Sized programs of runs with the same symbols, cached.

    Args:
        values: symbols; some are `VectorInt`.
        count: number of batches.
        rules: cached results of workspace rules.
    """

    def __init__(self, values: Mapping[str, Any], count: int, rules: KindSizes) -> None:
        super().__init__(values)
        self._count, self._rules = count, rules

    def sized(self, program: Program) -> SizedProgram:
        """Return the program with its sizes."""
        if program not in self._known:
            self._known[program] = ArraySized(program, self._values, self._count, self._rules)
        return self._known[program]

    def largest(self, sums: Sequence[Any]) -> tuple[int, ...]:
        """Return the indices of the sums that are the largest for some batch."""
        rows = np.array([np.broadcast_to(plain(each), self._count) for each in sums])
        return tuple(_each_once(rows.argmax(axis=0)))


class Sizers:
    """Cache of the sizers of the last runs over many batches: consecutive runs often share them."""

    FEW = 4

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], ArraySizer] = {}
        self._rules = KindSizes()

    def sizer_of(self, spec: Spec, gpu: GpuSpec | None) -> ArraySizer:
        """Return the sizer of a run with `VectorInt`."""
        lanes = {name: value.values for name in BATCH if isinstance(value := getattr(spec.training, name), VectorInt)}
        found = elementwise(lambda some: symbol_values(changed(spec, **some), gpu), lanes)
        values = {name: VectorInt(value) if isinstance(value, np.ndarray) else value for name, value in found.items()}
        key = tuple(values.items())
        if key not in self._known:
            count = len(next(iter(lanes.values())))
            while len(self._known) >= self.FEW:
                del self._known[next(iter(self._known))]
            self._known[key] = ArraySizer(values, count, self._rules)
        return self._known[key]


class _Highest(NamedTuple):
    """The peaks of a span.

    Args:
        candidates: points of the step that are the peak for some batch.
        chosen: index of each batch's candidate. [n]
    """

    candidates: list[tuple[StageTimeline, PeakCandidate]]
    chosen: Indices


class StageSums:
    """Bytes that the ranks of one stage allocate, phase by phase, over many batches.

    Args:
        spec: the run, with `VectorInt`.
        stage: the pipeline stage.
        gpu: the GPU, for kernel workspaces that depend on it.
        sizers: cached sizers of runs with these batches.
        count: number of batches.

    Attributes:
        index: index of the stage.
        totals: bytes at the peak of each phase; 0 for evaluation if the run has none. [phases, n]
    """

    def __init__(self, spec: Spec, stage: Stage, gpu: GpuSpec | None, sizers: Sizers, count: int) -> None:
        phases = run_phases(spec)
        self.index = stage.index
        self.totals: Matrix = np.zeros((len(ALL_PHASES), count))
        self._steady: list[list[tuple[Component, Any]]] = [[] for _ in ALL_PHASES]  # by phase
        self._highest: list[_Highest | None] = [None] * len(ALL_PHASES)
        for (phase, component), amount in state_sums(spec, stage).items():
            self._add(phases.index(phase), component, amount)
        items, around = persistent_items(spec, stage, gpu)
        for item in items:
            for phase in phases_of(item.mask, phases):
                self._add(phases.index(phase), item.component, item.count * item.each)
                self._add(phases.index(phase), Component.BLOCK_ROUNDING, item.count * (item.block - item.each))
        if spec.training.completion_length is not None:
            self._add_rollouts(spec, stage, gpu, phases.index(GENERATION))
        for span in spans(spec, stage, gpu, around, sizers.sizer_of):
            candidates = [*span.candidates]
            rows = np.array([np.broadcast_to(plain(of.bytes(moment)), count) for of, moment in candidates])
            found = _Highest(candidates, rows.argmax(axis=0))
            for phase in phases_of(span.mask, phases):
                self.totals[phases.index(phase)] += rows.max(axis=0)
                self._highest[phases.index(phase)] = found

    def _add_rollouts(self, spec: Spec, stage: Stage, gpu: GpuSpec | None, phase: int) -> None:
        """What generation holds, batch by batch: its forwards are estimated for single numbers."""
        count = self.totals.shape[1]
        exact, rounding = np.zeros((len(COMPONENTS), count)), np.zeros(count)
        fields = {name: plain(getattr(spec.training, name)) for name in BATCH}
        for number in range(count):
            own = {name: int(np.broadcast_to(each, count)[number]) for name, each in fields.items()}
            run = spec.model_copy(update={"training": spec.training.model_copy(update=own)})
            for item in rollouts(run, stage, gpu):
                exact[COMPONENTS.index(item.component), number] += item.count * item.each
                rounding[number] += item.count * (item.block - item.each)
        for component, amounts in zip(COMPONENTS, exact, strict=True):
            self._add(phase, component, amounts)
        self._add(phase, Component.BLOCK_ROUNDING, rounding)

    def _add(self, phase: int, component: Component, amount: Any) -> None:
        self._steady[phase].append((component, plain(amount)))
        self.totals[phase] += plain(amount)

    def components(self, phase: int, cells: Indices) -> Matrix:
        """Return the bytes by component at the peak of a phase. [components, cells]

        Args:
            phase: index of the phase.
            cells: indices of the batches.
        """
        found = np.zeros((len(COMPONENTS), len(cells)))
        for component, amount in self._steady[phase]:
            found[COMPONENTS.index(component)] += _of(amount, cells)
        highest = self._highest[phase]
        if highest is not None:
            chosen = highest.chosen[cells]
            for number in _each_once(chosen):
                where = np.flatnonzero(chosen == number)
                found[:, where] += _components(*highest.candidates[number], cells[where])
        return found


def _of(amount: Any, cells: Indices) -> Any:
    """Return the amount of some batches; a single amount is returned unchanged."""
    return amount[cells] if isinstance(amount, np.ndarray) else amount


def _components(timeline: StageTimeline, candidate: PeakCandidate, cells: Indices) -> Matrix:
    """Return the bytes by component at a point in the step. [components, cells]"""
    found = np.zeros((len(COMPONENTS), len(cells)))
    for item, count in candidate.engine:
        each, block = (plain(size) for size in (item.each, item.block))
        found[COMPONENTS.index(item.component)] += _of(each * count, cells)
        found[_ROUNDING] += _of((block - each) * count, cells)
    storages: dict[int, list[tuple[int, int]]] = {}
    for block, several, count in candidate.holdings:
        storages.setdefault(block, []).extend((storage, count) for storage in several)
    for block, counted in storages.items():
        sized = timeline.blocks[block].sized
        assert isinstance(sized, ArraySized)
        sized.add_components(found, counted, cells)
    return found
