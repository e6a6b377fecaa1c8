"""Sums of atoms in, bytes out: the stage, the phase and the moment that need most, and what is alive then.

What moves on a stage and what stands there are summed once for all contexts that have it; their phases are sums of the
two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memcalc.engine.atoms import LARGEST, Atoms, Bytes, fitted
from memcalc.engine.highest import Numbers, highest
from memcalc.engine.stage import StageForms
from memcalc.engine.table import COMPONENTS
from memcalc.estimation.items import PHASES

MOST = 2**21  # numbers of results that are made at a time

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


def sums(contexts: Sequence[Sequence[StageForms]], atoms: Atoms, lanes: range, *, ledger: bool) -> Iterator[Sums]:
    """The sums of some contexts that are made of the same atoms, in order.

    Args:
        contexts: the stages of each that may need most, in order.
        atoms: what they are made of.
        lanes: for which batches.
        ledger: also by phase and component.
    """
    table = np.ascontiguousarray(atoms.table[:, lanes.start : lanes.stop])
    step = max(MOST // (WIDTH * table.shape[1]), 1)
    for start in range(0, len(contexts), step):
        several = contexts[start : start + step]
        stages = [stage for context in several for stage in context]
        yield from _Summed(stages, atoms, table).contexts(np.cumsum([0, *map(len, several)]), ledger=ledger)


class _Summed:
    """The bytes of some stages by phase, for all batches.

    Attributes:
        phases: the highest moment of each. [stages, phases, n]
        moments: which of the moments of the phase that is. [passes + 1, n]
        segment_of: the row of `moments` of each phase. [stages, phases]
    """

    def __init__(self, stages: Sequence[StageForms], atoms: Atoms, table: Bytes) -> None:
        self.stages = stages
        self.numbers = np.array([stage.number for stage in stages])
        self.atoms = atoms
        self.table = table
        # Many stages share what moves, or what stands.
        movings = {id(stage.moving): stage.moving for stage in stages}
        standings = {id(stage.standing): stage.standing for stage in stages}
        forms = [fitted(each.forms, len(atoms)) for each in movings.values()]
        ends = np.cumsum(np.concatenate([[0], *(each.sizes for each in movings.values()), [1]]))
        heights, self.moments = highest(np.concatenate([*forms, np.zeros((1, len(atoms)))]), ends, table)
        first = np.cumsum([0, *(len(each.sizes) for each in movings.values())]).tolist()
        segments = {
            key: np.where(each.pass_of == len(each.sizes), len(heights) - 1, each.pass_of + before)
            for (key, each), before in zip(movings.items(), first, strict=False)
        }
        standing = dict(zip(standings, _over([each.totals for each in standings.values()], table), strict=True))
        others = {id(stage.others): stage.others for stage in stages if stage.others is not None}
        waiting = dict(zip(others, _over([each.totals for each in others.values()], table), strict=True))
        self.segment_of: Numbers = np.stack([segments[id(stage.moving)] for stage in stages])
        self.phases: Bytes = heights[self.segment_of]
        for number, stage in enumerate(stages):
            self.phases[number] += standing[id(stage.standing)]
            if stage.others is not None:
                self.phases[number, stage.moving.pass_of < len(stage.moving.sizes)] += waiting[id(stage.others)]

    def contexts(self, ends: Numbers, *, ledger: bool) -> Iterator[Sums]:
        """The results of contexts; `ends` says where the stages of each begin, and where those of the last one end."""
        peaks = self.phases.max(axis=1)
        lanes = np.arange(self.table.shape[1])
        for start, stop in pairwise(ends.tolist()):
            found = np.empty((WIDTH, self.table.shape[1]))
            stage = start + (peaks[start:stop].argmax(axis=0) if stop > start + 1 else np.zeros_like(lanes))
            alone = bool((stage == stage[0]).all())
            phases = self.phases[stage[0]] if alone else self.phases[stage, :, lanes].T
            phase = phases.argmax(axis=0)
            moment = self.moments[self.segment_of[stage, phase], lanes]
            found[BY_PHASE] = np.minimum(phases, 2 * LARGEST)  # what is more is no longer exact, and no int64 at last
            found[PHASE] = phase
            found[STAGE] = (
                self.stages[stage[0]].number if alone else [self.stages[each].number for each in stage.tolist()]
            )
            self._components(found[AT_PEAK], stage, phase, moment)
            yield Sums(found, self._ledger(stage) if ledger else None)

    def _components(
        self, found: Bytes, stage: npt.NDArray[np.intp], phase: npt.NDArray[np.intp], moment: npt.NDArray[np.intp]
    ) -> None:
        """Write what is alive in moments of stages. [components, n]"""
        code = (stage * len(PHASES) + phase) * (int(moment.max()) + 1) + moment
        several = (
            [slice(None)] if (code == code[0]).all() else [np.flatnonzero(code == each) for each in np.unique(code)]
        )
        for lanes in several:
            place = (int(each[lanes][0]) for each in (phase, moment))
            forms = self.stages[stage[lanes][0]].components(self.atoms, *place)
            found[:, lanes] = forms @ self.table[:, lanes]

    def _ledger(self, stage: npt.NDArray[np.intp]) -> Bytes:
        """Bytes by phase and component, each in the highest moment of its phase. [phases, components, n]"""
        found = np.empty((len(PHASES), len(COMPONENTS), self.table.shape[1]))
        for phase in range(len(PHASES)):
            moment = self.moments[self.segment_of[stage, phase], np.arange(self.table.shape[1])]
            self._components(found[phase], stage, np.full_like(stage, phase), moment)
        return found


def _over(forms: Sequence[Bytes], table: Bytes) -> Bytes:
    """Several forms for all batches; some may be of a time when there were fewer atoms. [forms, ..., n]"""
    if not forms:
        return np.empty(0)
    several = np.stack([fitted(each, len(table)) for each in forms])
    used = several.any(axis=tuple(range(several.ndim - 1)))  # most atoms are of other things
    found: Bytes = several[..., used] @ table[used]
    return found
