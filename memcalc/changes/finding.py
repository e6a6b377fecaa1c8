"""The smallest changes of a run that would make it fit: single ones, and pairs of which neither half is enough."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import combinations, product

from memcalc.changes.candidates import OTHER_CARD, RESULTS, Candidate
from memcalc.errors import InputError
from memcalc.estimation.estimate import estimate
from memcalc.ledger.result import Result
from memcalc.spec.loading import load
from memcalc.spec.spec import Spec

MOST_PAIRS = 3

# What a run needs, and whether that is there; None where nothing says how much there is. Bytes.
Judge = Callable[[Result], tuple[int, bool | None]]


@dataclass(frozen=True, slots=True)
class Change:
    """One or two levers, as --set takes them, and what they save. Bytes."""

    levers: tuple[str, ...]
    overrides: tuple[str, ...]
    cost: str
    result: str
    allocated: int  # peak, as estimated
    saved: int  # of the estimated peak
    needed: int  # as the judge says
    fits: bool | None  # None where nothing says how much there is
    spec: Spec  # the run with them


class Finder:
    """Tries changes of one run.

    Args:
        spec: the run.
        offered: the changes to try, the cheapest first, of each lever the mildest first.
        peak: allocated bytes of the run as it is.
        judge: says of an estimate what it needs, and whether that fits.
        hopeless: says, sooner than an estimate, of what runs a pair need not be looked at: they do not fit.
    """

    def __init__(
        self,
        spec: Spec,
        offered: Iterable[Candidate],
        peak: int,
        judge: Judge,
        hopeless: Callable[[Spec], bool] = lambda _: False,
    ) -> None:
        self._blocks = spec.model_dump()
        self._peak, self._judge, self._hopeless = peak, judge, hopeless
        tried = [(candidate, self._evaluated((candidate,))) for candidate in offered]
        self._possible = [(candidate, change) for candidate, change in tried if change is not None]

    def singles(self) -> list[Change]:
        """Those that help. Of each lever the mildest that fits, else the strongest; first those that fit."""
        kept: dict[str, Change] = {}
        for candidate, change in self._possible:
            known = kept.get(candidate.lever)
            if _helps(change) and (known is None or (not known.fits and (change.fits or change.saved > known.saved))):
                kept[candidate.lever] = change
        fitting = [change for change in kept.values() if change.fits]
        others = [change for change in kept.values() if not change.fits]
        return [*fitting, *sorted(others, key=lambda change: -change.saved)]

    def pairs(self) -> list[Change]:
        """The cheapest pairs that fit, of levers of which neither is enough alone; of two levers the mildest pair."""
        enough = {candidate.lever for candidate, change in self._possible if change.fits}
        levers: dict[str, list[Candidate]] = {}
        for candidate, _ in self._possible:
            if candidate.lever not in enough:
                levers.setdefault(candidate.lever, []).append(candidate)
        found: list[Change] = []
        for several in sorted(combinations(levers.values(), 2), key=_worst_result):
            names = {lever[0].lever for lever in several}
            better = RESULTS[: _worst_result(several)]
            if any(change.result in better and names.intersection(change.levers) for change in found):
                continue  # one of the two goes with something at a lower price
            change = self._mildest(several)
            if change is not None:
                found.append(change)
            if len(found) == MOST_PAIRS:
                break
        return found

    def _mildest(self, levers: tuple[list[Candidate], list[Candidate]]) -> Change | None:
        """The mildest pair of two levers that fits; if the strongest of both does not, none does."""
        pairs = [pair for pair in product(*levers) if _apart(pair)]
        if not pairs or not self._fits(pairs[-1]):
            return None
        pairs.sort(key=lambda pair: sum(lever.index(part) for lever, part in zip(levers, pair, strict=True)))
        return next(change for pair in pairs if (change := self._evaluated(pair)) is not None and change.fits)

    def _fits(self, parts: tuple[Candidate, ...]) -> bool:
        change = self._evaluated(parts)
        return change is not None and bool(change.fits)

    def _evaluated(self, parts: tuple[Candidate, ...]) -> Change | None:
        """What the changes come to; None: they contradict the rest of the run, or are not modelled."""
        overrides = tuple(override for part in parts for override in part.overrides)
        try:
            spec = load(self._blocks, overrides)
            if len(parts) > 1 and self._hopeless(spec):
                return None
            result = estimate(spec)
        except InputError:
            return None
        needed, fits = self._judge(result)
        allocated = result.ledger.peak_bytes
        return Change(
            levers=tuple(part.lever for part in parts),
            overrides=overrides,
            cost="; ".join(part.cost for part in parts),
            result=max((part.result for part in parts), key=RESULTS.index),
            allocated=allocated,
            saved=self._peak - allocated,
            needed=needed,
            fits=fits,
            spec=result.spec,
        )


def _helps(change: Change) -> bool:
    return change.saved > 0 or change.result == OTHER_CARD


def _apart(pair: tuple[Candidate, ...]) -> bool:
    """Whether no field is set by both."""
    fields = [override.partition("=")[0] for part in pair for override in part.overrides]
    return len(set(fields)) == len(fields)


def _worst_result(levers: tuple[list[Candidate], ...]) -> int:
    return max(RESULTS.index(lever[0].result) for lever in levers)
