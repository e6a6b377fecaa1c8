"""Why configurations of a grid are invalid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from memcalc.errors import InputError
from memcalc.estimation.estimate import estimate
from memcalc.spec.broken import Broken
from memcalc.spec.spec import Spec
from memcalc.sweeping.contexts import Codes, Contexts
from memcalc.sweeping.lanes import Indices

VALID, NOT_MODELLED = 0, -1  # codes; others are the number of the first rule that does not hold, from 1


class Reasons:
    """Why configurations of a box of a grid are invalid.

    Args:
        contexts: the grid's.
        codes: of each configuration: `VALID`; `NOT_MODELLED`, or a value is none of its field; or the number of the
            first rule that does not hold. [n]
        start: the number of the first configuration.
    """

    def __init__(self, contexts: Contexts, codes: Codes, start: int) -> None:
        self._contexts, self._codes, self._start = contexts, codes, start

    def spec(self, index: int) -> Spec:
        """One configuration, loaded.

        Raises:
            InputError: it is invalid.
        """
        return self._contexts.spec(self._start + index)

    def of(self, index: int) -> str:
        """The message that estimating one configuration gives; "" where it is valid."""
        try:
            estimate(self.spec(index))
        except InputError as error:
            where = error.where.removeprefix("--set: ")  # the field is varied; nobody has written --set
            return str(InputError(error.problem, error.remedy, where))
        return ""

    def counts(self) -> Counter[str]:
        """How many configurations are invalid for each reason.

        Those that differ in their batches alone and break the same rule have the reason of the first of them.
        """
        found: Counter[str] = Counter()
        for _, members in self._alike():
            found[self.of(int(members[0]))] += len(members)
        return found

    def all(self) -> list[str]:
        """The reason of each configuration, as `of` gives it, and sooner. [n]"""
        found = np.full(len(self._codes), "", dtype=object)
        known: dict[Broken, str] = {}
        for code, members in self._alike():
            if code == NOT_MODELLED:
                found[members] = self.of(int(members[0]))
                continue
            for broken, alike in self._worded(code, members):
                if broken not in known:
                    known[broken] = self.of(int(alike[0]))
                found[alike] = known[broken]
        texts: list[str] = found.tolist()
        return texts

    def _worded(self, code: int, members: Indices) -> Iterator[tuple[Broken, Indices]]:
        """The messages of a rule, and the configurations of one context that they are for."""
        contexts = self._contexts
        spec = contexts.loaded(contexts.grid.point(self._start + int(members[0])))
        steps = np.unravel_index(self._start + members, contexts.grid.shape)
        batches = {
            field: np.array([contexts.grid.axes[number].values[step][0] for step in steps[number]], dtype=np.float64)
            for number, field in contexts.inner.items()
        }
        if not batches:
            batches = {"micro_batch_size": np.full(len(members), spec.training.micro_batch_size, dtype=np.float64)}
        for where, broken in contexts.worded(spec, code, batches):
            yield broken, members[where]

    def _alike(self) -> Iterator[tuple[int, Indices]]:
        """Codes, and the configurations of one context that have them, in order."""
        invalid = np.flatnonzero(self._codes != VALID)
        shape = self._contexts.grid.shape
        steps = np.unravel_index(self._start + invalid, shape)
        outer = self._contexts.outer
        context = np.zeros(len(invalid), dtype=np.int64)
        for number in outer:
            context = context * shape[number] + steps[number]
        key = context * (len(self._contexts.rules) + 2) + self._codes[invalid] + 1
        _, first, group = np.unique(key, return_index=True, return_inverse=True)
        order = np.argsort(group, kind="stable")
        for members in np.split(invalid[order], np.cumsum(np.bincount(group))[:-1]) if len(first) else ():
            yield int(self._codes[members[0]]), members
