"""Why configurations of a grid cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from memcalc.engine.lanes import Lanes, Spoken, elementwise
from memcalc.engine.points import Numbers, Points
from memcalc.engine.reading import changed
from memcalc.errors import InputError
from memcalc.estimation.estimate import estimate
from memcalc.spec.broken import Broken
from memcalc.spec.inference_rules import of_training


class Pruned:
    """The configurations of a grid that cannot be.

    Args:
        points: the grid's.
    """

    def __init__(self, points: Points) -> None:
        self.points = points

    def reason(self, number: int) -> str:
        """Why one configuration cannot be sized; "" where it can."""
        try:
            estimate(self.points.spec(number))
        except InputError as error:
            where = error.where.removeprefix("--set: ")  # the field is varied; nobody has written --set
            return str(InputError(error.problem, error.remedy, where))
        return ""

    def alike(self, numbers: Numbers, *, worded: bool) -> Iterator[tuple[Broken | None, Numbers]]:
        """Configurations that cannot be, by what they break.

        Those that differ in their batches alone break the same where the same rule is the first that does not hold.

        Args:
            numbers: theirs.
            worded: with the same numbers in its words, too.

        Yields:
            The rule that is broken, if `worded`, and those that break it, in order. None: no rule is.
        """
        axes = self.points.grid.axes
        steps = dict(enumerate(np.unravel_index(numbers, self.points.grid.shape)))
        groups: dict[tuple[int, ...], list[int]] = {}
        outer = [steps[number].tolist() for number in steps if number not in self.points.inner]
        for index, place in enumerate(zip(*outer, strict=True) if outer else [()] * len(numbers)):
            groups.setdefault(place, []).append(index)
        for group in groups.values():
            members = numbers[group]
            lanes = {
                field: np.array([axes[number].values[step][0] for step in steps[number][group].tolist()])
                for number, field in self.points.inner.items()
            }
            known, broken = self._first_broken(int(members[0]), lanes, worded=worded)
            if isinstance(broken, int):
                yield known[broken], members
                continue
            for number in sorted({*broken.tolist()}):
                yield known[number], members[broken == number]

    def _first_broken(
        self, number: int, lanes: dict[str, Numbers], *, worded: bool
    ) -> tuple[list[Broken | None], int | Numbers]:
        """What is broken first by one configuration with several batches, and for each of them which of these."""
        known: dict[object, Broken | None] = {None: None}  # nothing, or it cannot even be loaded
        try:
            spec = of_training(self.points.loaded(self.points.grid.point(number)), "sweep")
        except InputError:
            return [None], 0

        def first(some: dict[str, Any]) -> dict[str, int]:
            run = changed(spec, **some)
            for rule in self.points.rules:
                for broken in rule(run):
                    known.setdefault(broken if worded else rule, broken if worded else None)
                    return {"": [*known].index(broken if worded else rule)}
            return {"": 0}

        found = (elementwise(first, lanes, Spoken if worded else Lanes) if lanes else first({}))[""]
        return [*known.values()], found
