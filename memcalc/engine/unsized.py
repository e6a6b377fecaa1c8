"""Which moments there are while sizes are not known.

`estimation.timeline` looks at the one position of a block where most is alive; here sizes are not known yet, so it is
given every position that no other one contains.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from memcalc.engine.highest import not_contained
from memcalc.estimation.moments import Block
from memcalc.estimation.program import Program, Stream
from memcalc.estimation.stages import Kind, Stage, runs_of
from memcalc.estimation.timeline import Timeline

Counts = npt.NDArray[np.int32]


class Unsized(Timeline):
    """A timeline whose sizes are not known, and not asked for."""

    def highest_positions(
        self, block: Block, stream: Stream, since: int = 0, among: frozenset[int] | None = None
    ) -> Iterable[int]:
        """Every position that may be the highest for some sizes."""
        return _tops(block.program, stream, since, among, head=block.part == "head")

    def highest_layers(self, kind: Kind, stage: Stage) -> Iterable[int]:
        """Both ends of every run of such layers, between which the sum is linear."""
        return {
            layer for run in runs_of(self.spec, stage) if run.traits == kind.traits for layer in (run.first, run.last)
        }


def _tops(program: Program, stream: Stream, since: int, among: frozenset[int] | None, *, head: bool) -> tuple[int, ...]:
    key = (head, stream, since, among)
    found: dict[Any, tuple[int, ...]] = program.findings.setdefault("tops", {})
    if key not in found:
        found[key] = _find_tops(program, stream, since, among, head=head)
    return found[key]


def _find_tops(
    program: Program, stream: Stream, since: int, among: frozenset[int] | None, *, head: bool
) -> tuple[int, ...]:
    """The positions that no other one contains, among those at which something is made."""
    current = np.zeros(len(program.kinds), dtype=np.int32)
    heights: list[Counts] = []
    positions: list[int] = []
    early: list[bool] = []  # the workspace of matrix products is not there yet
    for position, event in enumerate(program.stream(stream), 1):
        current[program.kind_of[event.storage]] += event.sign
        if (event.sign > 0 and position >= since) if among is None else position in among:
            heights.append(current.copy())
            positions.append(position)
            early.append(head and stream == "backward" and position < program.first_product)
    tops: list[int] = []
    for state in (True, False):
        alike = [index for index, each in enumerate(early) if each is state]
        if alike:
            kept = not_contained(np.array([heights[index] for index in alike]), _never_zero(program))
            tops += [positions[alike[index]] for index in kept]
    return tuple(sorted(tops)) or (since,)


def _never_zero(program: Program) -> npt.NDArray[np.bool_]:
    """Of each of its sizes; a rule may give none, and a difference of axes may be none."""
    return np.array([kind.rule is None and not any("-" in axis for axis in kind.axes) for kind in program.kinds])
