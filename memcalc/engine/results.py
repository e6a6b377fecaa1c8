"""Sums of atoms in, bytes out: the stage, the phase and the moment that need most, and what is alive then.

The moments of all stages of many contexts are written as rows of one table, so that weighing them takes hardly longer
than for one context. Mostly one moment of one stage is the highest for all batches; then all bytes of a context are one
product of matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memcalc.engine.atoms import LARGEST, Atoms, Bytes
from memcalc.engine.dominance import Numbers, first_highest, not_lower
from memcalc.engine.moving import settle
from memcalc.engine.stage import StageForms
from memcalc.engine.table import COMPONENTS
from memcalc.estimation.items import PHASES

Integers = npt.NDArray[np.int64]
Lanes = slice | Numbers  # some of the batches

ALL = slice(None)


class Sums(NamedTuple):
    """The bytes of the rank that needs most.

    Args:
        peak: allocated at the peak. [n]
        phase: the number of its phase. [n]
        stage: the pipeline stage. [n]
        phases: in the highest moment of each phase. [phases, n]
        components: at the peak. [components, n]
        ledger: by phase and component, if asked for. [phases, components, n]
    """

    peak: Bytes
    phase: int | Integers
    stage: int | Integers
    phases: Bytes
    components: Bytes
    ledger: Bytes | None


class Rows(NamedTuple):
    """The moments of some stages.

    Args:
        forms: how often each has each atom. [rows, atoms]
        ends: where the rows of each stage begin, and where the last ones end. [stages + 1]
    """

    forms: Bytes
    ends: Numbers


def sums(contexts: Sequence[Sequence[StageForms]], atoms: Atoms, *, ledger: bool) -> Iterator[Sums | None]:
    """The sums of some contexts that are made of the same atoms, in order; None where one is too large.

    Args:
        contexts: the stages of each that may need most, in order.
        atoms: what they are made of.
        ledger: also by phase and component.
    """
    stages = [stage for context in contexts for stage in context]
    settle(list({id(stage.moving): stage.moving for stage in stages if not stage.moving.settled}.values()), atoms)
    moments = [stage.moments(len(atoms)) for stage in stages]
    rows = Rows(np.concatenate(moments), np.cumsum([0, *map(len, moments)]))
    ends = rows.ends[np.cumsum([0, *map(len, contexts)])]
    kept = not_lower(rows.forms, ends, atoms)
    parts = np.searchsorted(kept, ends).tolist()
    for start, stop in pairwise(parts):
        yield _sums_of(stages, rows, kept[start:stop], atoms, ledger=ledger)


def _sums_of(stages: list[StageForms], rows: Rows, kept: Numbers, atoms: Atoms, *, ledger: bool) -> Sums | None:
    pieces: list[tuple[Lanes, tuple[Any, ...]]] = []
    for row, lanes in _winners(rows.forms, kept, atoms):
        number = int(np.searchsorted(rows.ends, row, side="right")) - 1
        stage, moment = stages[number], row - int(rows.ends[number])
        forms = rows.forms[rows.ends[number] : rows.ends[number + 1]]
        phase = int(stage.moving.phase[moment])
        table = atoms.table if lanes is ALL else atoms.table[:, lanes]
        phases, found = _phases(stage, forms, stage.components(atoms, moment), table)
        whole = _ledger(stage, forms, atoms, table) if ledger else None
        pieces.append((lanes, (phases[phase], phase, stage.number, phases, found, whole)))
    result = Sums(*pieces[0][1]) if len(pieces) == 1 else _joined(atoms.count, pieces)
    return None if result.peak.max() > LARGEST else result


def _winners(forms: Bytes, rows: Numbers, atoms: Atoms) -> list[tuple[int, Lanes]]:
    """Of some rows those that are the highest for some batches, and for which."""
    if len(rows) == 1:
        return [(int(rows[0]), ALL)]
    _, winner = first_highest(forms[rows], atoms.table)
    found = np.flatnonzero(np.bincount(winner)).tolist()
    if len(found) == 1:
        return [(int(rows[found[0]]), ALL)]
    return [(int(rows[number]), np.flatnonzero(winner == number)) for number in found]


def _phases(stage: StageForms, forms: Bytes, components: Bytes, table: Bytes) -> tuple[Bytes, Bytes]:
    """The bytes of a stage by phase, and of some components. [phases, n], [components, n]"""
    heights = np.concatenate([forms, components]) @ table
    found = heights[len(forms) :]
    if len(forms) == len(PHASES):
        return heights[: len(PHASES)], found
    ends = stage.moving.ends
    phases = heights[ends[:-1]]
    for phase, (start, stop) in enumerate(pairwise(ends.tolist())):
        for moment in range(start + 1, stop):
            np.maximum(phases[phase], heights[moment], out=phases[phase])
    return phases, found


def _ledger(stage: StageForms, forms: Bytes, atoms: Atoms, table: Bytes) -> Bytes:
    """Bytes by phase and component, each in the highest moment of its phase. [phases, components, n]"""
    found = np.empty((len(PHASES), len(COMPONENTS), table.shape[1]))
    for phase, (start, stop) in enumerate(pairwise(stage.moving.ends.tolist())):
        _, winner = first_highest(forms[start:stop], table)
        for moment in np.flatnonzero(np.bincount(winner)).tolist():
            lanes = np.flatnonzero(winner == moment)
            found[phase][:, lanes] = stage.components(atoms, start + moment) @ table[:, lanes]
    return found


def _joined(count: int, pieces: list[tuple[Lanes, tuple[Any, ...]]]) -> Sums:
    """The sums of all batches from those of some."""
    joined: list[Any] = []
    for several in zip(*(sums for _, sums in pieces), strict=True):
        if several[0] is None:
            joined.append(None)
            continue
        leading = np.shape(several[0])[:-1]
        table = np.empty((*leading, count), dtype=np.asarray(several[0]).dtype)
        for (lanes, _), values in zip(pieces, several, strict=True):
            table[..., lanes] = values
        joined.append(table)
    return Sums(*joined)
