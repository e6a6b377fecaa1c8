"""What comes and goes on a stage: the moments of its phases that may be their highest, as sums of atoms."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from memcalc.engine.atoms import Atoms, Bytes, fitted
from memcalc.engine.dominance import Numbers, not_lower
from memcalc.engine.moments import Use, add_item
from memcalc.estimation.items import PHASES
from memcalc.estimation.passes import Pass

Streams = tuple[tuple[str, bool], ...]  # phases: their stream, and whether the first matrix product makes a workspace


class Alike(NamedTuple):
    """Passes in which the same stands around the layers.

    Args:
        uses: the courses of a stage's chunks.
        passes: of which phases.
    """

    uses: list[Use]
    passes: tuple[Pass, ...]


class Moments(NamedTuple):
    """Moments of some phases of a course: those that may be the highest, whatever the sizes of buffers are.

    Args:
        forms: what blocks hold: how often it has each atom. [moments, atoms]
        buffers: how many of each of the engine's buffers stand around it, and of the workspace. [moments, slots]
        passes: the number of the phase. [moments]
        numbers: which of the phase's moments it is. [moments]
    """

    forms: Bytes
    buffers: Bytes
    passes: Numbers
    numbers: Numbers


class Piece(NamedTuple):
    """Moments that were found together.

    Args:
        alike: the passes that they are of.
        chunks: which of the stage's chunks each is of. [moments]
        passes: the number of its phase. [moments]
        numbers: which of the phase's moments it is. [moments]
    """

    alike: Alike
    chunks: Numbers
    passes: Numbers
    numbers: Numbers


class Source(NamedTuple):
    """Moments that were weighed together.

    Args:
        forms: their bytes; the last row is nothing. [moments + 1, atoms]
        pieces: what they are.
        starts: where each piece begins, and where the last one ends. [pieces + 1]
    """

    forms: Bytes
    pieces: list[Piece]
    starts: list[int]


class Moving:
    """The moments of one stage that may be the highest of their phases, in order of these; known once `settle` ran.

    Args:
        several: all passes.

    Attributes:
        forms: the bytes of each moment; a phase in which nothing moves has one of none. [moments, atoms]
        phase: the number of its phase. [moments]
        ends: where the moments of each phase begin, and where the last ones end. [phases + 1]
    """

    forms: Bytes
    phase: Numbers
    ends: Numbers

    def __init__(self, several: list[Alike]) -> None:
        self.several = several
        self._rows: list[int] | None = None
        self._components: dict[int, Bytes] = {}

    @property
    def passes(self) -> int:
        """How many there are."""
        return sum([len(alike.passes) for alike in self.several])

    @property
    def pass_of(self) -> tuple[int | None, ...]:
        """The number of the pass of each phase, if anything moves in it. [phases]"""
        return _pass_of(tuple([which.mask for alike in self.several for which in alike.passes]))

    @property
    def settled(self) -> bool:
        """Whether its moments are known."""
        return self._rows is not None

    def take(self, source: Source, phases: list[Numbers]) -> None:
        """Take the moments of each phase, as rows of what was weighed with others."""
        self._source = source
        rows = np.concatenate(phases)
        lengths = [len(several) for several in phases]
        self._rows = rows.tolist()
        self.forms = source.forms[rows]
        self.phase = np.repeat(np.arange(len(PHASES)), lengths)
        self.ends = np.cumsum([0, *lengths])

    def components(self, atoms: Atoms, moment: int) -> Bytes | None:
        """What is alive in one of the moments, by component; None: nothing. [components, atoms]"""
        assert self._rows is not None, "settled"
        row = self._rows[moment]
        if row == self._source.starts[-1]:
            return None
        if moment not in self._components:
            piece = bisect_right(self._source.starts, row) - 1
            self._components[moment] = _components(self._source.pieces[piece], row - self._source.starts[piece], atoms)
        return self._components[moment]


def _components(piece: Piece, row: int, atoms: Atoms) -> Bytes:
    use = piece.alike.uses[piece.chunks[row]]
    which = piece.alike.passes[piece.passes[row]]
    phase = use.course.phase_of(which)
    number = int(piece.numbers[row])
    table: Bytes = use.course.components(atoms, [*phase.candidates[number].holdings, *use.others()])
    items = [*use.items, which.workspace]
    for slot, count in enumerate(phase.buffers[number].tolist()):
        item = items[slot]
        if count and item is not None:
            add_item(table, atoms, item, count)
    return table


def settle(movings: Sequence[Moving], atoms: Atoms) -> None:
    """Find the moments of several stages. All are weighed at once, which takes hardly longer than those of one.

    Chunks of a stage run one after the other: the one with the highest counts. Of moments that are equally high the
    first is meant, as in `estimation.timeline`.
    """
    if not movings:
        return
    several = [alike for moving in movings for alike in moving.several]
    _learn({(id(use.course), _streams(alike)): (use, alike) for alike in several for use in alike.uses}, atoms)
    forms: list[Bytes] = []
    pieces: list[Piece] = []
    lengths: list[Numbers] = []
    for alike in several:
        form, piece = _piece(alike, atoms)
        forms.append(form)
        pieces.append(piece)
        lengths.append(np.bincount(piece.passes, minlength=len(alike.passes)))
    rows = np.concatenate([*forms, np.zeros((1, len(atoms)))])
    ends = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
    kept = not_lower(rows[:-1], ends, atoms)
    parts = np.searchsorted(kept, ends).tolist()
    source = Source(rows, pieces, np.cumsum([0, *map(len, forms)]).tolist())
    nothing = np.array([len(rows) - 1])
    first = 0
    for moving in movings:
        own = [kept[start:stop] for start, stop in pairwise(parts[first : first + moving.passes + 1])]
        moving.take(source, [nothing if number is None else own[number] for number in moving.pass_of])
        first += moving.passes


def _piece(alike: Alike, atoms: Atoms) -> tuple[Bytes, Piece]:
    """The moments of some passes over all chunks, with the engine's buffers and other micro-batches in flight."""
    streams = _streams(alike)
    workspace = next((each.workspace for each in alike.passes if each.workspace is not None), None)
    found: list[Moments] = []
    forms: list[Bytes] = []
    for use in alike.uses:
        moments: Moments = atoms.kept["moments", id(use.course), streams][1]
        form = fitted(moments.forms, len(atoms))
        items = [*use.items, *(() if workspace is None else (workspace,))]
        if items:
            sizes = np.zeros((moments.buffers.shape[1], len(atoms)))
            for slot, item in enumerate(items):
                size, atom = atoms.of(item.block)
                sizes[slot, atom] = size
            form = form + moments.buffers @ sizes
        if max(use.flights) > 1:
            form = form + _others(use, atoms)
        found.append(moments)
        forms.append(form)
    if len(found) == 1:
        own = found[0]
        return forms[0], Piece(alike, np.zeros(len(own.numbers), dtype=np.intp), own.passes, own.numbers)
    passes = np.concatenate([own.passes for own in found])
    order = np.argsort(passes, kind="stable")
    chunks = np.repeat(np.arange(len(found)), [len(own.numbers) for own in found])
    numbers = np.concatenate([own.numbers for own in found])
    return np.concatenate(forms)[order], Piece(alike, chunks[order], passes[order], numbers[order])


def _learn(asked: dict[tuple[int, Streams], tuple[Use, Alike]], atoms: Atoms) -> None:
    """Weigh the moments of courses that have the same buffers around them."""
    missing = {key: each for key, each in asked.items() if ("moments", *key) not in atoms.kept}
    if not missing:
        return
    segments: list[tuple[int, Numbers, Bytes]] = []  # the number of the pass, its moments, and their forms
    ends: list[int] = [0]
    for use, alike in missing.values():
        sizes = use.course.sizes(atoms)
        for number, which in enumerate(alike.passes):
            phase = use.course.phase_of(which)
            forms = phase.counts @ sizes
            segments += [(number, several, forms[several]) for several in phase.groups]
        ends.append(len(segments))
    rows = np.concatenate([forms for _, _, forms in segments])
    numbers = np.concatenate([several for _, several, _ in segments])
    row_ends = np.cumsum([0, *(len(several) for _, several, _ in segments)])
    passes = np.repeat([number for number, _, _ in segments], np.diff(row_ends))
    kept = not_lower(rows, row_ends, atoms)
    parts = np.searchsorted(kept, row_ends)[ends].tolist()
    for (key, (use, alike)), (start, stop) in zip(missing.items(), pairwise(parts), strict=True):
        own = kept[start:stop]
        own = own[np.lexsort((numbers[own], passes[own]))]
        phases = [use.course.phase_of(which) for which in alike.passes]
        buffers = np.array([phases[which].buffers[n] for which, n in zip(passes[own], numbers[own], strict=True)])
        atoms.kept["moments", *key] = use.course, Moments(rows[own], buffers, passes[own], numbers[own])


def _streams(alike: Alike) -> Streams:
    return tuple([(each.stream, each.workspace is not None) for each in alike.passes])


def _others(use: Use, atoms: Atoms) -> Bytes:
    """What other micro-batches in flight hold. [1, atoms]"""
    key = ("others", id(use.course), use.flights)
    if key not in atoms.kept:
        atoms.kept[key] = use.course, use.course.counts(use.others()) @ use.course.sizes(atoms)
    found: Bytes = atoms.kept[key][1]
    return fitted(found, len(atoms))


@lru_cache(maxsize=1024)
def _pass_of(masks: tuple[int, ...]) -> tuple[int | None, ...]:
    """The number of the mask that each phase is in."""
    return tuple(
        next((n for n, mask in enumerate(masks) if phase in phases_in(mask)), None) for phase in range(len(PHASES))
    )


@lru_cache(maxsize=1024)
def phases_in(mask: int) -> tuple[int, ...]:
    """The numbers of the phases of a mask."""
    return tuple(number for number in range(len(PHASES)) if mask >> number & 1)
