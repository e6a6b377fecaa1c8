"""Sums of atoms in, bytes out: the stage, the phase and the moment that need most, and what is alive then.

What moves on a stage and what stands there are summed once for all contexts that have it; their phases are sums of the
two. Contexts are taken a few at a time, so that their phases stay in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from memcalc.engine.atoms import LARGEST, ONE, Atoms, Bytes
from memcalc.engine.highest import Numbers, highest
from memcalc.engine.moving import Forms, Runs
from memcalc.engine.stage import Rank
from memcalc.engine.table import COMPONENTS
from memcalc.estimation.items import PHASES

MOST = 2**21  # numbers of results that are made at a time
FEW = 2**18  # and of phases of stages

# The rows of results: the number of the phase of the peak, that of its stage, bytes by phase, and those at the peak.
PHASE, STAGE = 0, 1
BY_PHASE = slice(2, 2 + len(PHASES))
AT_PEAK = slice(2 + len(PHASES), None)
WIDTH = 2 + len(PHASES) + len(COMPONENTS)


class Sums(NamedTuple):
    """The results of the rank that needs most.

    Args:
        rows: see above. [WIDTH, n]
        ledger: by phase and component, if asked for. [phases, components, n]
    """

    rows: Bytes
    ledger: Bytes | None


def sums(contexts: Sequence[Sequence[Rank]], atoms: Atoms, kinds: Sequence[slice], *, ledger: bool) -> Iterator[Sums]:
    """The sums of some contexts that are made of the same atoms, in order.

    Args:
        contexts: the stages of each that may need most, in order; those with as many stages are neighbours.
        atoms: what they are made of.
        kinds: the batches that have tapes of their own.
        ledger: also by phase and component.
    """
    step = max(MOST // (WIDTH * atoms.count), 1)
    for start in range(0, len(contexts), step):
        several = contexts[start : start + step]
        summed = _Summed([rank for context in several for rank in context], atoms, kinds)
        first = 0
        for stages, alike in groupby(map(len, several)):
            stop = first + stages * sum(1 for _ in alike)
            few = stages * max(FEW // (stages * len(PHASES) * atoms.count), 1)
            for row in range(first, stop, few):
                yield from summed.contexts(range(row, min(row + few, stop)), stages, ledger=ledger)
            first = stop


class _Summed:
    """Some stages over all batches."""

    def __init__(self, ranks: Sequence[Rank], atoms: Atoms, kinds: Sequence[slice]) -> None:
        self._ranks, self._atoms, self._table = ranks, atoms, atoms.table
        movings = {id(rank.moving): rank.moving for rank in ranks}
        numbers: dict[tuple[Runs, ...], int] = {}
        for moving in movings.values():
            for each in moving.passes:
                numbers.setdefault(each, len(numbers))
        # Behind all passes one in which nothing moves.
        self._heights: Bytes = np.zeros((len(numbers) + 1, atoms.count))
        self._highest = np.zeros(self._heights.shape, dtype=np.int32)
        self._forms = [Forms([each[kind] for each in numbers], atoms, lanes) for kind, lanes in enumerate(kinds)]
        self._widest = max(int(np.diff(each.ends).max()) for each in self._forms)
        for kind, (lanes, forms) in enumerate(zip(kinds, self._forms, strict=True)):
            self._heights[:-1, lanes], winners = highest(forms.forms, forms.ends, self._table[:, lanes])
            np.add(winners, kind * self._widest, out=self._highest[:-1, lanes])
        pass_of = {
            key: np.array([*(numbers[each] for each in moving.passes), len(numbers)])[moving.pass_of]
            for key, moving in movings.items()
        }
        self._passes: Numbers = np.stack([pass_of[id(rank.moving)] for rank in ranks])  # [ranks, phases]
        self._moves = self._passes < len(numbers)
        self._numbers = np.array([rank.number for rank in ranks])
        self._constant: Bytes = np.stack([rank.standing.constant for rank in ranks])  # [ranks, phases, components]
        self._totals: Bytes = self._constant.sum(axis=2)[:, :, None]
        self._varying = {each: each.totals(self._table) for each in {rank.standing.varying: None for rank in ranks}}
        held = {rank.moving.waiting: None for rank in ranks if rank.moving.waiting}
        self._held = {each: [kind.components(atoms) for kind in each] for each in held}
        self._waiting = {
            each: np.concatenate([own.sum(axis=0) @ self._table[:, k] for own, k in zip(several, kinds, strict=True)])
            for each, several in self._held.items()
        }
        self._known: dict[object, Bytes] = {}

    def contexts(self, rows: range, stages: int, *, ledger: bool) -> Iterator[Sums]:
        """The results of neighbours that have as many stages.

        Args:
            rows: their stages.
            stages: how many each has.
            ledger: also by phase and component.
        """
        count, lanes = len(rows) // stages, np.arange(self._table.shape[1])
        by_stage = self._phases(rows).reshape(count, stages, len(PHASES), -1)
        phases, peaks = by_stage[:, 0], by_stage[:, 0].max(axis=1)
        row = np.repeat(np.array(rows)[::stages, None], len(lanes), axis=1)  # that of the stage that needs most
        for number in range(1, stages):
            others = by_stage[:, number].max(axis=1)
            higher = others > peaks
            np.copyto(phases, by_stage[:, number], where=higher[:, None])
            np.copyto(peaks, others, where=higher)
            np.copyto(row, np.array(rows)[number::stages, None], where=higher)
        phase = np.zeros_like(row)
        for number in reversed(range(len(PHASES))):
            np.copyto(phase, number, where=phases[:, number] == peaks)
        found = np.empty((count, WIDTH, len(lanes)))
        found[:, PHASE], found[:, STAGE] = phase, self._numbers[row]
        # What is more is no longer exact, and no int64 at last.
        np.minimum(phases, 2 * LARGEST, out=found[:, BY_PHASE])
        self._components(found[:, AT_PEAK], row, phase)
        ledgers = None
        if ledger:
            ledgers = np.empty((count, len(PHASES), len(COMPONENTS), len(lanes)))
            for number in range(len(PHASES)):
                self._components(ledgers[:, number], row, np.full_like(phase, number))
        for number in range(count):
            yield Sums(found[number], None if ledgers is None else ledgers[number])

    def _phases(self, rows: range) -> Bytes:
        """The peak of each phase. [rows, phases, n]"""
        several = slice(rows.start, rows.stop)
        found: Bytes = self._heights[self._passes[several]]
        found += self._totals[several]
        for number, rank in enumerate(self._ranks[several]):
            found[number] += self._varying[rank.standing.varying]
            if rank.moving.waiting:
                found[number, self._moves[rows[number]]] += self._waiting[rank.moving.waiting]
        return found

    def _components(self, found: Bytes, row: Numbers, phase: Numbers) -> None:
        """Write what is alive at the peaks of phases of stages. [contexts, components, n]"""
        moment = self._highest[self._passes[row, phase], np.arange(row.shape[1])]
        code = ((row - row.min()) * len(PHASES) + phase) * len(self._forms) * self._widest + moment
        for own, rows, phases, moments, codes in zip(found, row, phase, moment, code, strict=True):
            counts = np.bincount(codes)
            there = np.flatnonzero(counts)
            commonest, *others = there[np.argsort(-counts[there])].tolist()
            first = int((codes == commonest).argmax())
            forms = self._alive(int(rows[first]), int(phases[first]), int(moments[first]))
            np.matmul(forms, self._table, out=own)  # for all batches, which takes less time than picking them
            for other in others:
                lanes = np.flatnonzero(codes == other)
                first = int(lanes[0])
                forms = self._alive(int(rows[first]), int(phases[first]), int(moments[first]))
                own[:, lanes] = forms @ self._table.take(lanes, axis=1)

    def _alive(self, row: int, phase: int, moment: int) -> Bytes:
        """What is alive in a moment: how often each component has each atom. [components, atoms]"""
        rank, number = self._ranks[row], int(self._passes[row, phase])
        key = (rank.standing.varying, phase, number, moment, rank.moving.waiting)
        if key not in self._known:
            table = rank.standing.varying.components(phase, len(self._atoms))
            if self._moves[row, phase]:
                kind, own = divmod(moment, self._widest)
                table += self._forms[kind].components(number, own)
                if rank.moving.waiting:
                    table += self._held[rank.moving.waiting][kind]
            self._known[key] = table
        found = self._known[key].copy()
        found[:, ONE] += self._constant[row, phase]
        return found
