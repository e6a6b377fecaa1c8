"""How configurations of a grid are judged: a lower bound, and what recorded runs of their kind reserved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from memcalc.errors import InputError
from memcalc.estimation.limits import limits_of
from memcalc.estimation.stages import stages_of
from memcalc.estimation.states import state_sums
from memcalc.ledger.verdict import Errors, holding_memory
from memcalc.spec.foreign import refuse_foreign
from memcalc.spec.spec import Spec
from memcalc.sweeping.arrays import changed
from memcalc.sweeping.lanes import Numbers as Batch
from memcalc.sweeping.lanes import elementwise
from memcalc.verdict.kinds import kinds_of
from memcalc.verdict.needs import can_replay
from memcalc.verdict.recorded import reserve_ratio

Integers = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.int32]
Verdicts = npt.NDArray[np.int8]

SweepAnswer = Literal["fits", "close", "does-not-fit"]

# The numbers by which a table has its verdicts, in this order.
FITS, CLOSE, DOES_NOT_FIT = range(3)
UNJUDGED = -1  # no card was named, or the configuration is invalid
AT_A_TIME = 16_384  # configurations that are judged at a time: they stay in the processor's cache
ANSWERS: tuple[SweepAnswer, ...] = ("fits", "close", "does-not-fit")


class Terms(NamedTuple):
    """How a configuration is judged.

    Args:
        ratio: the median of reserved over allocated memory of recorded runs of its kind.
        errors: of these runs around the median: the full recorded range.
        replays: whether an allocator replay can decide it.
        remainders: bytes of the allocated peak that the formulas assume and no bound contains, at most: those that the
            allocator does not split off the blocks of model states. 0 where `replays` is false: nothing is then known
            that is more exact.
        unmodelled: what holds memory, is asked for and is not modelled.
        unmodelled_bytes: what that holds at least.
    """

    ratio: float
    errors: Errors
    replays: bool
    remainders: int
    unmodelled: tuple[str, ...]
    unmodelled_bytes: int


class TermsList:
    """The terms of a grid's configurations, each once."""

    def __init__(self) -> None:
        self._numbers: dict[Terms, int] = {}

    @property
    def terms(self) -> tuple[Terms, ...]:
        """The terms by their numbers."""
        return tuple(self._numbers)

    def numbers(self, batches: Mapping[str, Batch], spec: Spec) -> int | Integers:
        """Return the number of the terms of a run; an array where they differ from batch to batch.

        Args:
            batches: values of the fields of `BATCH`, one of each per configuration. [n]
            spec: the run with any of them.
        """
        whole = _without_limits(spec)
        if not spec.origin.limits:  # those of the run itself are the same for all batches
            return self._number(_with_limits(whole, spec))
        found = elementwise(lambda some: {"": self._number(_with_limits(whole, changed(spec, **some)))}, batches)
        numbers: int | Integers = found[""]
        return numbers

    def _number(self, terms: Terms) -> int:
        return self._numbers.setdefault(terms, len(self._numbers))


def _without_limits(spec: Spec) -> Terms:
    ratio, errors = reserve_ratio(kinds_of(spec))
    replays = can_replay(spec)
    return Terms(ratio, errors, replays, _remainders(spec) if replays else 0, (), 0)


def _with_limits(terms: Terms, spec: Spec) -> Terms:
    limits = holding_memory(limits_of(spec))
    names, amount = tuple(limit.what for limit in limits), sum(limit.at_least_bytes for limit in limits)
    return terms._replace(unmodelled=names, unmodelled_bytes=amount)


def _remainders(spec: Spec) -> int:
    """Return the bytes of unsplit remainders of model states in the phase that has most of them."""
    try:
        refuse_foreign(spec)
        (stage,) = stages_of(spec)
        exact = state_sums(spec, stage, tails=False)
        found: dict[str, int] = {}
        for (phase, component), amount in state_sums(spec, stage).items():
            found[phase] = found.get(phase, 0) + amount - exact.get((phase, component), 0)
    except InputError:  # it is not modelled, and not sized either
        return 0
    return max(found.values(), default=0)


class Judged(NamedTuple):
    """What follows from the allocated peaks of some configurations.

    Args:
        reserved_bytes: the median of recorded runs. [n]
        verdict: numbers of `ANSWERS`. [n]
    """

    reserved_bytes: Integers
    verdict: Verdicts


def judged(peak: Integers, outside: Integers, usable: Integers, numbers: Numbers, terms: tuple[Terms, ...]) -> Judged:
    """Judge configurations as `memcalc.verdict.needs.recorded_need` does, but for those that a replay can decide.

    These are only called too large by a lower bound, which no replay contradicts.

    Args:
        peak: allocated bytes of the rank that needs most. [n]
        outside: of the context and the communication library. [n]
        usable: bytes of the card; -1: none was named. [n]
        numbers: of the terms of each. [n]
        terms: by number.
    """
    reserved, verdict = np.empty_like(peak), np.empty(len(peak), dtype=np.int8)
    several = len(terms) > 1
    for start in range(0, len(peak), AT_A_TIME):
        some = slice(start, start + AT_A_TIME)
        numbers_of = numbers[some] if several else numbers
        reserved[some], verdict[some] = _judged(peak[some], usable[some] - outside[some], numbers_of, terms)
    no_card = usable < 0
    if no_card.any():
        verdict[no_card] = UNJUDGED
    return Judged(reserved, verdict)


def _judged(
    peak: Integers, room: Integers, numbers: Numbers, terms: tuple[Terms, ...]
) -> tuple[npt.NDArray[np.float64], Verdicts]:
    """Return reserved bytes and verdicts; `room`: usable bytes that are not outside the allocator."""
    reserved = np.ceil(peak * of_each([each.ratio for each in terms], numbers))
    fits = reserved * of_each([1 + each.errors.high for each in terms], numbers) <= room
    if any(each.unmodelled for each in terms):
        fits &= of_each([not each.unmodelled for each in terms], numbers)
    room = room - of_each([each.unmodelled_bytes for each in terms], numbers)
    beyond = peak - of_each([each.remainders for each in terms], numbers) > room
    if not all(each.replays for each in terms):
        low = reserved * of_each([0.0 if each.replays else 1 + each.errors.low for each in terms], numbers)
        beyond |= low >= room + 1
    # Never both: FITS is one less than CLOSE, and DOES_NOT_FIT one more.
    return reserved, CLOSE - fits.view(np.int8) + beyond.view(np.int8)


def of_each(values: list[Any], numbers: Numbers) -> Any:
    """Return the value of each configuration, by the numbers of their terms; one value where all have the same."""
    if len(set(values)) > 1:
        return np.array(values)[numbers]
    return values[0] if values else 0  # none is valid
