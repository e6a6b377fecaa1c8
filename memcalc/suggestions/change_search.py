"""The smallest changes that make a run fit: single ones, and pairs of which neither half is enough."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from itertools import combinations, product
from typing import Any, NamedTuple

from memcalc.errors import InputError
from memcalc.estimation.estimate import estimate
from memcalc.ledger.result import Result
from memcalc.spec.spec import Spec
from memcalc.suggestions.candidates import ALLOCATOR, MORE_GPUS, NONE, OTHER_CARD, RESULTS, SAME, ChangeCandidate
from memcalc.suggestions.run_overrides import UserRun, joined

MOST_PAIRS = 2  # per kind of result

# Returns the bytes that a run needs, and whether they fit; None if there is no limit.
Judge = Callable[[Result], tuple[int, bool | None]]

Price = Callable[["ProposedChange"], tuple[float, ...]]  # sort key of changes with the same kind of result


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposedChange:
    """One or two changes, not estimated."""

    levers: tuple[str, ...]  # the kinds of change
    overrides: tuple[str, ...]  # as --set takes them
    cost: str  # in time or money, as text
    result: str  # one of RESULTS; the most costly among the changes
    costly_changes: int  # number of changes that require more than time
    spec: Spec  # the changed run


@dataclass(frozen=True, slots=True, kw_only=True)
class SuggestedChange(ProposedChange):
    """One or two changes, and their savings. Bytes."""

    allocated: int  # estimated peak
    saved: int  # reduction of the estimated peak
    needed: int  # according to the judge
    fits: bool | None  # None if there is no limit


class _LeverPair(NamedTuple):
    """Pairs of changes of two levers; a pair is numbered by its step of each lever."""

    levers: tuple[str, str]
    pairs: dict[tuple[int, int], tuple[ChangeCandidate, ChangeCandidate]]
    weak: list[tuple[int, int]]  # pairs that do not fit, nor do pairs of steps that are as mild or milder
    open: dict[tuple[int, int], Spec]  # the runs of the pairs that may fit, of equal ones the mildest first


class ChangeSearch:
    """Search for changes of one run.

    Args:
        run: the run.
        offered: the changes to try, cheapest first; of each lever the mildest first.
        peak: allocated bytes of the unchanged run.
        judge: returns the need of an estimate, and whether it fits.
        hopeless: returns, faster than an estimate, whether a pair's run cannot fit, so that it is skipped.
        price: sort key of changes; default: number of GPUs, then number of changes that require more than time.
        words: overrides from the run as written to the changed one, added to each change.
    """

    def __init__(
        self,
        run: UserRun,
        offered: Iterable[ChangeCandidate],
        peak: int,
        judge: Judge,
        hopeless: Callable[[Spec], bool] = lambda _: False,
        price: Price = lambda change: (change.spec.parallelism.ranks, change.costly_changes),
        words: Sequence[str] = (),
    ) -> None:
        self._run, self._base_overrides = run, words
        self._peak, self._judge, self._hopeless, self._price = peak, judge, hopeless, price
        tried = [(candidate, self._evaluated((candidate,))) for candidate in offered]
        self._possible = [(candidate, change) for candidate, change in tried if change is not None]

    def singles(self) -> list[SuggestedChange]:
        """Return single changes that help: per lever the mildest that fits, else the strongest; fitting ones first."""
        kept: dict[str, SuggestedChange] = {}
        for candidate, change in self._possible:
            known = kept.get(candidate.lever)
            if _helps(change) and (known is None or (not known.fits and (change.fits or change.saved > known.saved))):
                kept[candidate.lever] = change
        fitting = [change for change in kept.values() if change.fits]
        others = [change for change in kept.values() if not change.fits]
        return [*fitting, *sorted(others, key=lambda change: -change.saved)]

    def pairs(self) -> list[SuggestedChange]:
        """Return pairs that fit although neither half does alone; the mildest pair of each two levers.

        The cheapest pairs of each kind of result are returned, because a user without more GPUs needs alternatives that
        change the training result. Within one kind no lever is repeated; levers of pairs that keep the result without
        more GPUs are not repeated in other kinds, either. No pair multiplies the GPUs of a run twice that has several.
        """
        enough = {candidate.lever for candidate, change in self._possible if change.fits}
        levers: dict[tuple[str, str], list[ChangeCandidate]] = {}
        for candidate, _ in self._possible:
            if candidate.lever not in enough:
                levers.setdefault((candidate.lever, candidate.result), []).append(candidate)
        found: list[SuggestedChange] = []
        free: set[str] = set()  # levers of pairs that require neither GPUs nor another training result
        base = self._loaded(())
        several = base is not None and base.parallelism.ranks > 1
        for result in RESULTS:
            paired = set(free)
            most = len(free) + 2 * MOST_PAIRS
            for change in self._of_kind(result, [*levers.values()], paired, more_gpus_twice=not several):
                found.append(change)
                paired.update(change.levers)
                if len(paired) >= most:
                    break
            if result == SAME:
                free = paired
        return found

    def _of_kind(
        self, result: str, levers: list[list[ChangeCandidate]], passed: set[str], *, more_gpus_twice: bool
    ) -> Iterator[SuggestedChange]:
        """Yield the mildest pair of each two levers with this kind of result, the cheapest first.

        Two levers are judged when no other pair can be cheaper, because a verdict takes much longer than a price.

        Args:
            result: the kind of result.
            levers: the candidates of each lever.
            passed: levers to skip, to which the caller may add.
            more_gpus_twice: whether both changes may add GPUs.
        """
        waiting: list[tuple[tuple[float, ...], int, _LeverPair | SuggestedChange]] = []
        for number, (one, other) in enumerate(combinations(levers, 2)):
            kinds = (one[0].result, other[0].result)
            if kinds == (MORE_GPUS, MORE_GPUS) and not more_gpus_twice:
                continue
            if max(kinds, key=RESULTS.index) == result and passed.isdisjoint((one[0].lever, other[0].lever)):
                both = self._lever_pair(one, other)
                if both.open:
                    prices = (self._price(self._proposed(both.pairs[steps], run)) for steps, run in both.open.items())
                    waiting.append((min(prices), number, both))
        heapify(waiting)
        while waiting:
            _, number, first = waiting[0]
            if not passed.isdisjoint(first.levers):
                heappop(waiting)
            elif isinstance(first, SuggestedChange):
                heappop(waiting)
                yield first
            else:
                change = self._mildest(first)
                if change is None:
                    heappop(waiting)
                else:
                    heapreplace(waiting, (self._price(change), number, change))

    def _lever_pair(self, one: list[ChangeCandidate], other: list[ChangeCandidate]) -> _LeverPair:
        """Return the pairs of two levers; the strongest are excluded until one is not hopeless."""
        pairs = {steps: pair for steps, pair in _pairs_of((one, other)) if _apart(pair)}
        both = _LeverPair((one[0].lever, other[0].lever), pairs, [], {})
        for steps in reversed(pairs):
            if _within(steps, both.weak):
                continue
            spec = self._loaded(pairs[steps])
            if spec is None:
                continue  # invalid, but a milder change may be valid
            if not both.open and self._hopeless(spec):
                both.weak.append(steps)
            else:
                both.open[steps] = spec
        return both

    def _mildest(self, both: _LeverPair) -> SuggestedChange | None:
        """Return the mildest pair that fits, the cheapest of equally mild ones.

        The strongest pair is tried first: if it does not fit, milder ones are skipped.
        """
        weak, known = [*both.weak], dict[tuple[int, int], SuggestedChange | None]()

        def fitting(steps: tuple[int, int]) -> SuggestedChange | None:
            if steps not in known:
                known[steps] = self._fitting(both.pairs[steps], both.open[steps])
            return known[steps]

        for steps in both.open:
            if _within(steps, weak):
                continue
            if fitting(steps) is not None:
                break
            weak.append(steps)
        else:
            return None
        found: list[tuple[int, SuggestedChange]] = []
        for steps in sorted((steps for steps in both.pairs if steps in both.open), key=sum):
            if found and sum(steps) > found[0][0]:
                break
            change = None if _within(steps, weak) else fitting(steps)
            if change is not None:
                found.append((sum(steps), change))
        return min((change for _, change in found), key=self._price)

    def _fitting(self, parts: tuple[ChangeCandidate, ...], spec: Spec) -> SuggestedChange | None:
        """Return the changed run, or None if it does not fit or is not modelled."""
        if self._hopeless(spec):
            return None
        change = self._sized(parts, spec)
        return change if change is not None and change.fits else None

    def _loaded(self, parts: tuple[ChangeCandidate, ...]) -> Spec | None:
        """Return the changed run, or None if the changes contradict the rest of it."""
        try:
            return self._run.changed(self._overrides(parts))
        except InputError:
            return None

    def _evaluated(self, parts: tuple[ChangeCandidate, ...]) -> SuggestedChange | None:
        spec = self._loaded(parts)
        return None if spec is None else self._sized(parts, spec)

    def _sized(self, parts: tuple[ChangeCandidate, ...], spec: Spec) -> SuggestedChange | None:
        """Return the estimate with the changes; None if it is not modelled."""
        try:
            result = estimate(spec)
        except InputError:
            return None
        needed, fits = self._judge(result)
        allocated = result.ledger.peak_bytes
        return SuggestedChange(
            **self._words(parts),
            spec=result.spec,
            allocated=allocated,
            saved=self._peak - allocated,
            needed=needed,
            fits=fits,
        )

    def _proposed(self, parts: tuple[ChangeCandidate, ...], spec: Spec) -> ProposedChange:
        """Return the changes without an estimate."""
        return ProposedChange(**self._words(parts), spec=spec)

    def _words(self, parts: tuple[ChangeCandidate, ...]) -> dict[str, Any]:
        """Return the fields of a change that do not depend on its run."""
        return {
            "levers": tuple(part.lever for part in parts),
            "overrides": self._overrides(parts),
            "cost": "; ".join(dict.fromkeys(part.cost for part in parts if part.cost != NONE)) or NONE,
            "result": max((part.result for part in parts), key=RESULTS.index),
            "costly_changes": sum(part.result != SAME for part in parts),
        }

    def _overrides(self, parts: tuple[ChangeCandidate, ...]) -> tuple[str, ...]:
        """Return all `--set` overrides of the changed run, each field once."""
        changes = (override for part in parts for override in part.overrides)
        return joined(dict(word.split("=", 1) for word in (*self._base_overrides, *changes)))


def _pairs_of(
    levers: tuple[list[ChangeCandidate], list[ChangeCandidate]],
) -> Iterator[tuple[tuple[int, int], tuple[ChangeCandidate, ChangeCandidate]]]:
    """Yield every pair with the number of its step of each lever."""
    for (first, one), (second, other) in product(*map(enumerate, levers)):
        yield (first, second), (one, other)


def _within(steps: tuple[int, int], weak: Iterable[tuple[int, int]]) -> bool:
    """Return whether a pair that saves at least as much is known not to be enough."""
    return any(steps[0] <= first and steps[1] <= second for first, second in weak)


def _helps(change: SuggestedChange) -> bool:
    """Return whether a change is worth showing. Allocator settings reduce fragmentation, not allocated memory."""
    settings = ALLOCATOR in change.levers and change.fits is not False
    return change.saved > 0 or change.result == OTHER_CARD or settings


def _apart(pair: tuple[ChangeCandidate, ...]) -> bool:
    """Return whether two changes set different fields."""
    fields = [override.partition("=")[0] for part in pair for override in part.overrides]
    return len(set(fields)) == len(fields)
