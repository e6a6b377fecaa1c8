"""Peaks of one pipeline stage over many batches: bytes per phase, and the live tensors at the peak.

A step is recorded as for a single estimate (`memcalc.simulation.recorded_step`), once for all batches; sizes are
arrays. Where a single estimate picks the one highest point, every point that is the highest for some batch is kept.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from operator import add
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memcalc.estimation.transient import persistent_items, rollouts, spans
from memcalc.layout.stages import Stage
from memcalc.layout.symbols import symbol_values
from memcalc.ledger.component import Component
from memcalc.ledger.row_drafts import ALL_PHASES, GENERATION, phases_of, run_phases
from memcalc.programs.program import Program, StorageSize
from memcalc.programs.sized_program import ProgramSizer, SizedProgram
from memcalc.simulation.recorded_step import RecordedPasses
from memcalc.simulation.step_recorder import EXISTING
from memcalc.spec.hardware.gpus import GpuSpec
from memcalc.spec.spec import Spec
from memcalc.states.model_states import state_sums
from memcalc.stream.peaks import IntervalPeak, SizelessStream, live_at
from memcalc.stream.requests import TensorLabel
from memcalc.sweeping.vector_int import Indices, VectorInt, elementwise, plain

Matrix = npt.NDArray[np.float64]

COMPONENTS = tuple(Component)
BATCH = ("micro_batch_size", "sequence_length")  # the fields that can be `VectorInt`

_ROUNDING = COMPONENTS.index(Component.BLOCK_ROUNDING)
_BLOCK = 512.0  # see memcalc.allocator.pytorch.block_sizes


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
        sizes = [rules.bytes(kind, values) for kind in program.kinds]
        self.requested: Matrix = np.array([np.broadcast_to(size, count) for size in sizes]).reshape(-1, count)
        self.blocks: Matrix = np.ceil(self.requested / _BLOCK) * _BLOCK


def _each_once(numbers: Indices) -> list[int]:
    return np.flatnonzero(np.bincount(numbers)).tolist()


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


class Sizers:
    """Cache of the sizers of the last runs over many batches: consecutive runs often share them."""

    FEW = 4

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], ArraySizer] = {}
        self._rules = KindSizes()

    def sizer_of(self, spec: Spec, gpu: GpuSpec | None) -> ArraySizer:
        """Return the sizer of a run with `VectorInt`."""
        lanes = {name: value.values for name in BATCH if isinstance(value := getattr(spec.training, name), VectorInt)}
        found = elementwise(lambda some: symbol_values(spec.with_training(**some), gpu), lanes)
        values = {name: VectorInt(value) if isinstance(value, np.ndarray) else value for name, value in found.items()}
        key = tuple(values.items())
        if key not in self._known:
            count = len(next(iter(lanes.values())))
            while len(self._known) >= self.FEW:
                del self._known[next(iter(self._known))]
            self._known[key] = ArraySizer(values, count, self._rules)
        return self._known[key]


class _Highest(NamedTuple):
    """The peaks of a span."""

    points: list[tuple[RecordedPasses, IntervalPeak]]  # the points of its requests that may be the peak
    mask: int  # bits of the span's phases
    first: bool  # whether it is the first backward of the run
    chosen: Indices  # index of each batch's point. [n]


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
        for item in persistent_items(spec, stage, gpu):
            for phase in phases_of(item.mask, phases):
                self._add(phases.index(phase), item.component, item.count * item.each)
                self._add(phases.index(phase), Component.BLOCK_ROUNDING, item.count * (item.block - item.each))
        if spec.training.completion_length is not None:
            self._add_rollouts(spec, stage, gpu, phases.index(GENERATION))
        for span in spans(spec, stage, gpu, sizers.sizer_of):
            points: list[tuple[RecordedPasses, IntervalPeak]] = []
            heights: list[Matrix] = []
            for recorded in span.recorded:
                found = _heights(recorded.stream, span.phase, frozenset(recorded.rounds.items()))
                points += [(recorded, point) for point in found.points]
                beside = sum(plain(draft.count * draft.block) for draft in recorded.beside_in(span.mask))
                heights.append(found.sums @ _sizes(recorded, count, first=span.first) + beside)
            rows = np.concatenate(heights)
            for phase in phases_of(span.mask, phases):
                self.totals[phases.index(phase)] += rows.max(axis=0)
                self._highest[phases.index(phase)] = _Highest(points, span.mask, span.first, rows.argmax(axis=0))

    def _add_rollouts(self, spec: Spec, stage: Stage, gpu: GpuSpec | None, phase: int) -> None:
        """Add the memory of generation for each batch: its forwards are estimated one batch at a time."""
        count = self.totals.shape[1]
        exact, rounding = np.zeros((len(COMPONENTS), count)), np.zeros(count)
        fields = {name: plain(getattr(spec.training, name)) for name in BATCH}
        for number in range(count):
            own = {name: int(np.broadcast_to(each, count)[number]) for name, each in fields.items()}
            run = spec.with_training(**own)
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
                recorded, point = highest.points[number]
                found[:, where] += _components(recorded, point, cells[where], first=highest.first)
                for draft in recorded.beside_in(highest.mask):
                    exact, rounding = draft.count * draft.each, draft.count * (draft.block - draft.each)
                    found[COMPONENTS.index(draft.component), where] += _of(plain(exact), cells[where])
                    found[_ROUNDING, where] += _of(plain(rounding), cells[where])
        return found


def _of(amount: Any, cells: Indices) -> Any:
    """Return the amount of some batches; a single amount is returned unchanged."""
    return amount[cells] if isinstance(amount, np.ndarray) else amount


def _sizes(recorded: RecordedPasses, count: int, *, first: bool) -> Matrix:
    """Return the bytes of the blocks of each kind of storage. [kinds, n]"""
    found: list[Any] = []
    for kind in recorded.stream.kinds:
        if isinstance(kind.label, TensorLabel):
            sized, number = _sized(recorded, kind.label)
            found.append(sized.blocks[number])
        else:
            found.append(np.full(count, float(recorded.block_bytes(kind, first=first))))
    return np.array(found).reshape(-1, count)


def _sized(recorded: RecordedPasses, label: TensorLabel) -> tuple[ArraySized, int]:
    """Return the sizes of a tensor's block, and the number of its size."""
    sized = recorded.sized[label.block]
    assert isinstance(sized, ArraySized)
    return sized, sized.program.kind_of[label.storage]


def _components(recorded: RecordedPasses, point: IntervalPeak, cells: Indices, *, first: bool) -> Matrix:
    """Return the bytes by component at a point in the step. [components, cells]"""
    found = np.zeros((len(COMPONENTS), len(cells)))
    for number, storages in live_at(recorded.stream, point, recorded.rounds).items():
        kind = recorded.stream.kinds[number]
        if isinstance(kind.label, TensorLabel):
            sized, size = _sized(recorded, kind.label)
            requested, blocks = (storages * each[size, cells] for each in (sized.requested, sized.blocks))
        elif kind.label is Component.GRADIENTS and recorded.recording.takes_over:
            continue  # counted with the model states
        else:
            blocks = storages * recorded.block_bytes(kind, first=first)
            requested = blocks if kind.once else storages * kind.requested
        component = kind.label if isinstance(kind.label, Component) else kind.label.component
        found[COMPONENTS.index(component)] += requested
        found[_ROUNDING] += blocks - requested
    return found


@lru_cache(maxsize=64)
def _heights(stream: SizelessStream, phase: str, rounds: frozenset[tuple[Hashable, int]]) -> Heights:
    """Return the points of a pass, which steps of several batches, ZeRO stages and ranks share."""
    return Heights(stream, phase, dict(rounds))


class Heights:
    """The points of one pass: where a storage is allocated and the next request frees one, in any round that matters.

    Args:
        stream: the requests of a step.
        phase: the pass.
        rounds: the rounds of loops with names.

    Attributes:
        points: the points; their bytes are not set.
        sums: how many storages of each kind are live at each point, less those that exist before the step.
            [points, kinds]
    """

    def __init__(self, stream: SizelessStream, phase: str, rounds: Mapping[Hashable, int]) -> None:
        self.points: list[IntervalPeak] = []
        self._level = [0] * len(stream.kinds)  # live storages by kind
        self._rows: list[list[int]] = []
        existing = [*self._level]
        for number, (each, script) in enumerate(zip(stream.phases, stream.scripts, strict=True)):
            if each == phase:
                self._note(number, 0)
            for begin, end, times in stream.segments(number, rounds):
                self._add(number, begin, script[begin:end], times, noted=each == phase)
            if each == EXISTING:
                existing = [*self._level]
            if each == phase:
                break
        shape = (len(self._rows), len(stream.kinds))
        self.sums: npt.NDArray[np.float64] = np.array(self._rows, dtype=np.float64).reshape(shape) - existing

    def _add(self, stretch: int, begin: int, script: Sequence[int], rounds: int, *, noted: bool) -> None:
        """Add the requests of several rounds, and record the points of the first and the last round."""
        level, before, first = self._level, [*self._level], len(self.points)
        for position, kind in enumerate(script, 1):
            if kind < 0:
                level[~kind] -= 1
                continue
            level[kind] += 1
            if noted and (position == len(script) or script[position] < 0):
                self._note(stretch, begin + position)
        if rounds == 1:
            return
        further = [(after - earlier) * (rounds - 1) for earlier, after in zip(before, level, strict=True)]
        for index in range(first, len(self.points)):
            self.points.append(self.points[index]._replace(last=True))
            self._rows.append([*map(add, self._rows[index], further)])
        self._level = [*map(add, level, further)]

    def _note(self, stretch: int, position: int) -> None:
        self.points.append(IntervalPeak(0, stretch, position, last=False))
        self._rows.append([*self._level])
