"""Batches that one set of arrays does for, and contexts that are sized together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import groupby, islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memcalc.engine.atoms import LARGEST, Atoms, Batches, Rules, TooLarge
from memcalc.engine.points import Context
from memcalc.engine.reading import Reader, changed
from memcalc.engine.results import sums
from memcalc.engine.stage import StageForms, stage_forms
from memcalc.engine.table import COMPONENTS
from memcalc.errors import InputError
from memcalc.estimation.blocks.catalogue import Gradients, Part, program
from memcalc.estimation.blocks.structure import Structure, structure_of
from memcalc.estimation.estimate import estimate
from memcalc.estimation.items import PHASES
from memcalc.estimation.program import Program
from memcalc.estimation.stages import Stage, stages_of, stages_that_matter
from memcalc.ledger.result import Result
from memcalc.spec.cards import find_card
from memcalc.spec.segments import has_segments
from memcalc.spec.spec import Spec

Integers = npt.NDArray[np.int64]
NDIndices = npt.NDArray[np.intp]
TOO_LARGE = np.full((1, 1, 1, 1), 2 * LARGEST)  # what stands for results that no table holds
Place = tuple[Any, ...]  # an index of an array with an axis for each field of `BATCH`

FEW = 6  # configurations of one context that are sized one by one: arrays pay from here on
MOST = 16_384  # batches whose bytes are in memory at a time
MOST_CONTEXTS = 1024  # contexts that are weighed at a time
MOST_KEPT = 2**20  # batches of which tables of sizes are kept
MOST_FOUND = 65_536  # results that are kept


class Found(NamedTuple):
    """The results of some batches of a context.

    Args:
        context: which.
        where: what they are for: numbers of the values of each field of `BATCH`, or slices where these are neighbours.
        rows: of results (results.py); more than `LARGEST` where a phase has more. [rows, micro_batch_size,
            sequence_length, 1]
        ledger: [phases, components, ...], if asked for.
    """

    context: Context
    where: Place
    rows: npt.NDArray[np.float64] | Integers
    ledger: Any


class Alike(NamedTuple):
    """Batches of a context that have the same tapes and as many micro-batches in flight.

    Args:
        micro: the numbers of their values of each field of `BATCH`.
        lengths: likewise.
        steps: likewise.
        beside: the micro-batches whose sizes are in the same arrays; those of `micro` are neighbours there.
    """

    micro: list[int]
    lengths: list[int]
    steps: list[int]
    beside: list[int]

    @property
    def numbers(self) -> tuple[list[int], list[int], list[int]]:
        """Those of their values."""
        return self.micro, self.lengths, self.steps

    @property
    def halves(self) -> list[Alike]:
        """Half as many batches, twice."""
        longer, several = max((self.micro, self.lengths), key=len), []
        for own in (longer[: len(longer) // 2], longer[len(longer) // 2 :]):
            micro, lengths = (own, self.lengths) if longer is self.micro else (self.micro, own)
            several.append(Alike(micro, lengths, self.steps, micro))
        return several

    @property
    def lanes(self) -> range:
        """Where they are in these arrays."""
        first = self.beside.index(self.micro[0])
        return range(first * len(self.lengths), (first + len(self.micro)) * len(self.lengths))


class Job(NamedTuple):
    """Batches of a context that are sized together.

    Args:
        context: which.
        batches: which of its batches.
        stages: those that may need most.
    """

    context: Context
    batches: Alike
    stages: list[StageForms]


class Sizer:
    """Sizes contexts; what several of them share is kept."""

    def __init__(self, *, ledger: bool) -> None:
        self._ledger = ledger
        self._forget()

    def _forget(self) -> None:
        self._reader = Reader()
        self._rules: dict[object, Rules] = {}
        self._kept = 0

    def found(self, contexts: Iterable[Context]) -> Iterator[Found]:
        """The results of contexts, in pieces and in any order.

        Batches that cannot be are left out or without meaning, contexts that are not modelled left out.
        """
        rest = iter(contexts)
        while several := list(islice(rest, MOST_CONTEXTS)):
            if self._kept > MOST_KEPT or len(self._reader) > MOST_FOUND:
                self._forget()
            self._reader.meet(context.spec for context in several)
            yield from self._found(several)

    def _found(self, contexts: list[Context]) -> Iterator[Found]:
        waiting: dict[tuple[Atoms, range], list[Job]] = {}
        for context in contexts:
            others: list[Found] = []
            try:
                for atoms, job in [*self._jobs(context, others)]:
                    waiting.setdefault((atoms, job.batches.lanes), []).append(job)
            except InputError:  # it is not modelled
                continue
            yield from others
        for (atoms, lanes), jobs in waiting.items():
            yield from self._together(atoms, lanes, jobs)

    def _jobs(self, context: Context, others: list[Found]) -> Iterator[tuple[Atoms, Job]]:
        """The batches of a context that are sized together; what is found of others at once is added to `others`."""
        if context.valid.size <= FEW or has_segments(context.spec.training.recompute):
            others += self._one_by_one(context, np.argwhere(context.valid))
            return
        differs = self._reader.find("differs", context.spec, _differs_from_one)
        waiting = [*_alike(context, differs=differs)]
        while waiting:
            batches = waiting.pop()
            try:
                yield self._job(context, batches)
            except TooLarge:
                if self._all_too_large(context, batches):
                    others.append(Found(context, _place(*batches.numbers), TOO_LARGE, TOO_LARGE))
                else:
                    waiting += batches.halves

    def _all_too_large(self, context: Context, batches: Alike) -> bool:
        """Whether the smallest of some batches is."""
        b, s, _ = context.batch
        micro, length = min(batches.micro, key=b.__getitem__), min(batches.lengths, key=s.__getitem__)
        try:
            self._job(context, Alike([micro], [length], batches.steps, [micro]))
        except TooLarge:
            return True
        return False

    def _job(self, context: Context, batches: Alike) -> tuple[Atoms, Job]:
        micro, lengths, steps = batches.numbers
        b, s, m = context.batch
        own = (tuple([b[i] for i in batches.beside]), tuple([s[i] for i in lengths]))
        update = {
            "micro_batch_size": b[micro[0]],
            "sequence_length": own[1][0],
            "gradient_accumulation_steps": m[steps[0]],
        }
        spec = changed(context.spec, **update)
        card = None if spec.hardware.gpu is None else find_card(spec.hardware.gpu)
        find = self._reader.find
        atoms = find(("atoms", own), spec, lambda run: self._atoms(run, own))
        stages = find("stages", spec, stages_that_matter)
        # Nothing but the stages depends on how many micro-batches there are, only on whether there are several.
        alike = changed(spec, gradient_accumulation_steps=min(m[steps[0]], 2))
        structure = find("structure", alike, self._structure)
        forms = [stage_forms(self._reader, alike, structure, atoms, each, card) for each in stages]
        return atoms, Job(context, batches, forms)

    def _structure(self, run: Spec) -> Structure:
        found = structure_of(run)
        return self._reader.same(found, found)

    def _atoms(self, run: Spec, own: tuple[tuple[int, ...], ...]) -> Atoms:
        b, s = np.meshgrid(*(np.array(each, dtype=np.int64) for each in own), indexing="ij")
        self._kept += b.size
        card = None if run.hardware.gpu is None else find_card(run.hardware.gpu)
        return Atoms(run, card, Batches(b.ravel(), s.ravel()), self._rules.setdefault(own, Rules()))

    def _together(self, atoms: Atoms, lanes: range, jobs: list[Job]) -> Iterator[Found]:
        several = sums([job.stages for job in jobs], atoms, lanes, ledger=self._ledger)
        for job, found in zip(jobs, several, strict=True):
            shape = (len(job.batches.micro), len(job.batches.lengths), 1)
            ledger = None if found.ledger is None else found.ledger.reshape(len(PHASES), -1, *shape)
            yield Found(job.context, _place(*job.batches.numbers), found.rows.reshape(-1, *shape), ledger)

    def _one_by_one(self, context: Context, indices: NDIndices) -> Iterator[Found]:
        b, s, m = context.batch
        for i, j, k in indices.tolist():
            update = {"micro_batch_size": b[i], "sequence_length": s[j], "gradient_accumulation_steps": m[k]}
            spec = changed(context.spec, **update)
            yield _single(context, _place([i], [j], [k]), estimate(spec), ledger=self._ledger)


def _place(*several: list[int]) -> Place:
    """Neighbours as slices, which arrays are written by much sooner."""
    if all(numbers[-1] - numbers[0] == len(numbers) - 1 for numbers in several):
        return tuple(slice(numbers[0], numbers[-1] + 1) for numbers in several)
    return np.ix_(*several)


def _single(context: Context, where: Place, result: Result, *, ledger: bool) -> Found:
    phase, stage = PHASES.index(result.ledger.peak_phase), result.headline.rank["pipeline_stage"]
    if result.ledger.peak_bytes > LARGEST:
        return Found(context, where, TOO_LARGE, TOO_LARGE)
    table = np.array(
        [[result.ledger.components_by_phase[each].get(part, 0) for part in COMPONENTS] for each in PHASES],
        dtype=np.int64,
    )
    one = (1, 1, 1)
    return Found(
        context,
        where,
        np.array([phase, stage, *table.sum(axis=1), *table[phase]]).reshape(-1, *one),
        table.reshape(*table.shape, *one) if ledger else None,
    )


def _alike(context: Context, *, differs: bool) -> Iterator[Alike]:
    """Batches that are sized together; `differs`: the tapes of several sequences are others than those of one.

    Of accumulation counts whether there is any, and how many micro-batches are in flight. Sequence lengths that no rule
    allows are left out.
    """
    b, s, m = context.batch
    lengths = [number for number in range(len(s)) if context.valid[:, number].any()]
    step = max(MOST // len(lengths), 1)
    several = {number: differs and size > 1 for number, size in enumerate(b)}
    micro = sorted(several, key=several.__getitem__)
    steps: dict[object, list[int]] = {}
    for number, count in enumerate(m):
        flights = tuple([_in_flight(stage) for stage in stages_of(context.spec, count)])
        steps.setdefault((count > 1, flights), []).append(number)
    for start in range(0, len(micro), step):
        beside = micro[start : start + step]
        for _, some in groupby(beside, several.__getitem__):
            own = list(some)
            for alike in steps.values():
                yield Alike(own, lengths, alike, beside)


def _differs_from_one(spec: Spec) -> bool:
    """Whether the tapes of several sequences are others than those of one."""
    structure = structure_of(spec)
    return _tapes_differ(structure._replace(batched=False), structure._replace(batched=True))


@lru_cache(maxsize=1024)
def _tapes_differ(one: Structure, two: Structure) -> bool:
    kept = Gradients(kept=True, main_dtype=None)
    layers: tuple[Part, ...] = ("dense layer", "expert layer") if one.has_experts else ("dense layer",)
    parts: tuple[Part, ...] = ("embedding", "tables", *layers, "head")
    return any(_streams(program(one, part, False, kept)) != _streams(program(two, part, False, kept)) for part in parts)


def _streams(block: Program) -> tuple[object, ...]:
    streams = (block.forward, block.loss, block.backward, block.region, block.names)
    return (block.kinds, block.kind_of, block.labels, *streams)


@lru_cache(maxsize=4096)
def _in_flight(stage: Stage) -> tuple[int, ...]:
    pieces = stage.chunks
    return tuple([held for piece in pieces for held in (piece.in_flight, piece.embeddings, piece.heads, piece.waiting)])
