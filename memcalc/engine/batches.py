"""Contexts that are sized together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memcalc.engine.alike import Alike, alike_batches, alike_steps, differs_from_one
from memcalc.engine.atoms import LARGEST, Atoms, TooLarge
from memcalc.engine.points import Context
from memcalc.engine.reading import Reader, changed
from memcalc.engine.results import sums
from memcalc.engine.rules import Batches, Rules, Symbols
from memcalc.engine.stage import Rank, places_of, ranks
from memcalc.engine.table import COMPONENTS
from memcalc.errors import InputError
from memcalc.estimation.blocks.structure import Structure, structure_of
from memcalc.estimation.estimate import estimate
from memcalc.estimation.items import PHASES
from memcalc.ledger.result import Result
from memcalc.spec.cards import find_card
from memcalc.spec.segments import has_segments
from memcalc.spec.spec import Spec

Integers = npt.NDArray[np.int64]
NDIndices = npt.NDArray[np.intp]
TOO_LARGE = np.full((1, 1, 1, 1), 2 * LARGEST)  # what stands for results that no table holds
Place = tuple[Any, ...]  # an index of an array with an axis for each field of `BATCH`

FEW = 6  # configurations of one context that are sized one by one: arrays pay from here on
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


class Job(NamedTuple):
    """Batches of a context that are sized together.

    Args:
        context: which.
        batches: which of its batches.
        ranks: the stages that may need most.
    """

    context: Context
    batches: Alike
    ranks: list[Rank]


class Sizer:
    """Sizes contexts; what several of them share is kept."""

    def __init__(self, *, ledger: bool) -> None:
        self._ledger = ledger
        self._forget()

    def _forget(self) -> None:
        self._reader = Reader()
        self._rules: dict[object, Rules] = {}  # by the batches that they are for
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
        waiting: dict[tuple[Atoms, int], list[Job]] = {}
        for context in contexts:
            others: list[Found] = []
            try:
                for atoms, job in [*self._jobs(context, others)]:
                    waiting.setdefault((atoms, job.batches.single), []).append(job)
            except InputError:  # it is not modelled
                continue
            yield from others
        for (atoms, _), jobs in waiting.items():
            yield from self._together(atoms, jobs)

    def _jobs(self, context: Context, others: list[Found]) -> Iterator[tuple[Atoms, Job]]:
        """The batches of a context that are sized together; what is found of others at once is added to `others`."""
        if context.valid.size <= FEW or has_segments(context.spec.training.recompute):
            others += self._one_by_one(context, np.argwhere(context.valid))
            return
        differs = differs_from_one(self._reader.find("structure", context.spec, self._structure))
        counts = context.batch[-1]
        steps = self._reader.find(("steps", counts), context.spec, partial(alike_steps, counts=counts))
        waiting = [*alike_batches(context, steps, differs=differs)]
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
            self._job(context, Alike([micro], [length], batches.steps, 0))
        except TooLarge:
            return True
        return False

    def _job(self, context: Context, batches: Alike) -> tuple[Atoms, Job]:
        micro, lengths, steps = batches.numbers
        b, s, m = context.batch
        update = {"sequence_length": s[lengths[0]], "gradient_accumulation_steps": m[steps[0]]}
        spec = changed(context.spec, micro_batch_size=b[micro[0]], **update)
        card = None if spec.hardware.gpu is None else find_card(spec.hardware.gpu)
        find = self._reader.find
        own = b, s, tuple(micro), tuple(lengths)
        atoms = find(("atoms", own), spec, partial(self._atoms, own=own))
        places = find("places", spec, places_of)
        # Nothing but the stages depends on how many micro-batches there are, only on whether there are several.
        update["gradient_accumulation_steps"] = min(m[steps[0]], 2)
        alike = [changed(spec, micro_batch_size=b[micro[first]], **update) for first in batches.kinds]
        kinds = [(each, find("structure", each, self._structure)) for each in alike]
        return atoms, Job(context, batches, ranks(self._reader, kinds, atoms, places, card))

    def _structure(self, run: Spec) -> Structure:
        found = structure_of(run)
        return self._reader.same(found, found)

    def _atoms(self, run: Spec, own: tuple[tuple[int, ...], ...]) -> Atoms:
        b, s, micro, lengths = own
        symbols = self._reader.find(("symbols", b, s), run, partial(self._symbols, b=b, s=s))
        self._kept += len(micro) * len(lengths)
        return Atoms(symbols, _lanes(micro, lengths, len(s)), self._rules.setdefault((b, s), Rules()))

    def _symbols(self, run: Spec, b: tuple[int, ...], s: tuple[int, ...]) -> Symbols:
        mesh = np.meshgrid(*(np.array(each, dtype=np.int64) for each in (b, s)), indexing="ij")
        self._kept += mesh[0].size
        card = None if run.hardware.gpu is None else find_card(run.hardware.gpu)
        return Symbols(run, card, Batches._make(each.ravel() for each in mesh))

    def _together(self, atoms: Atoms, jobs: list[Job]) -> Iterator[Found]:
        jobs.sort(key=lambda job: len(job.ranks))
        alike: dict[tuple[Rank, ...], list[Job]] = {}  # contexts that differ in nothing that is summed
        for job in jobs:
            alike.setdefault(tuple(job.ranks), []).append(job)
        several = sums([*alike], atoms, jobs[0].batches.lanes, ledger=self._ledger)
        for own, found in zip(alike.values(), several, strict=True):
            for job in own:
                shape = (len(job.batches.micro), len(job.batches.lengths), 1)
                ledger = None if found.ledger is None else found.ledger.reshape(len(PHASES), -1, *shape)
                yield Found(job.context, _place(*job.batches.numbers), found.rows.reshape(-1, *shape), ledger)

    def _one_by_one(self, context: Context, indices: NDIndices) -> Iterator[Found]:
        b, s, m = context.batch
        for i, j, k in indices.tolist():
            update = {"micro_batch_size": b[i], "sequence_length": s[j], "gradient_accumulation_steps": m[k]}
            spec = changed(context.spec, **update)
            yield _single(context, _place([i], [j], [k]), estimate(spec), ledger=self._ledger)


def _lanes(micro: tuple[int, ...], lengths: tuple[int, ...], count: int) -> NDIndices | slice:
    """Where batches are among all of a context, which has so many lengths: a slice where they are neighbours."""
    first = micro[0]
    if len(lengths) == count and micro == tuple(range(first, first + len(micro))):
        return slice(first * count, (first + len(micro)) * count)
    places: NDIndices = np.add.outer(np.array(micro) * count, np.array(lengths)).ravel()
    return places


def _place(*several: list[int]) -> Place:
    """Neighbours as slices, which arrays are written by much sooner."""
    if all(numbers == [*range(numbers[0], numbers[-1] + 1)] for numbers in several):
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
