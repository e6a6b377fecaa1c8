"""Reasons why configurations of a grid are invalid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from memcalc.errors import InputError
from memcalc.estimation.estimate import estimate
from memcalc.spec.rule_sets.violations import Violation
from memcalc.spec.spec import Spec
from memcalc.sweeping.contexts import Codes, Contexts
from memcalc.sweeping.vector_int import Indices

VALID, NOT_MODELLED = 0, -1  # codes; any other code is the number of the first violated rule, from 1


class Reasons:
    """Reasons why configurations in a box of a grid are invalid.

    Args:
        contexts: the contexts of the grid.
        codes: for each configuration: `VALID`, `NOT_MODELLED` (also if a value is invalid for its field), or the number
            of the first violated rule. [n]
        start: index of the first configuration.
    """

    def __init__(self, contexts: Contexts, codes: Codes, start: int) -> None:
        self._contexts, self._codes, self._start = contexts, codes, start

    def spec(self, index: int) -> Spec:
        """Return one configuration, loaded.

        Raises:
            InputError: the configuration is invalid.
        """
        return self._contexts.spec(self._start + index)

    def of(self, index: int) -> str:
        """Return the error message of one configuration's estimate; "" if it is valid."""
        try:
            estimate(self.spec(index))
        except InputError as error:
            where = error.location.removeprefix("--set: ")  # the field is varied; the user wrote no --set
            return str(InputError(error.problem, error.remedy, where))
        return ""

    def counts(self) -> Counter[str]:
        """Return the number of invalid configurations by reason.

        Configurations of one context that violate the same rule share the message of the first of them.
        """
        found: Counter[str] = Counter()
        for _, members in self._alike():
            found[self.of(int(members[0]))] += len(members)
        return found

    def all(self) -> list[str]:
        """Return the reason of each configuration, as `of` does, but faster. [n]"""
        found = np.full(len(self._codes), "", dtype=object)
        known: dict[Violation, str] = {}
        for code, members in self._alike():
            if code == NOT_MODELLED:
                found[members] = self.of(int(members[0]))
                continue
            for broken, alike in self._violations(code, members):
                if broken not in known:
                    known[broken] = self.of(int(alike[0]))
                found[alike] = known[broken]
        texts: list[str] = found.tolist()
        return texts

    def _violations(self, code: int, members: Indices) -> Iterator[tuple[Violation, Indices]]:
        """Yield the violations of a rule, each with the configurations of one context that share its message."""
        contexts = self._contexts
        spec = contexts.loaded(contexts.grid.point(self._start + int(members[0])))
        steps = np.unravel_index(self._start + members, contexts.grid.shape)
        batches = {
            field: np.array([contexts.grid.axes[number].values[step][0] for step in steps[number]], dtype=np.float64)
            for number, field in contexts.inner.items()
        }
        if not batches:
            batches = {"micro_batch_size": np.full(len(members), spec.training.micro_batch_size, dtype=np.float64)}
        for where, broken in contexts.violations_by_message(spec, code, batches):
            yield broken, members[where]

    def _alike(self) -> Iterator[tuple[int, Indices]]:
        """Yield each code with the configurations of one context that have it, in order."""
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
