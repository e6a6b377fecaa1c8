"""Verdicts of a grid's configurations: by a lower bound, and by the reserved memory of recorded runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from memcalc.errors import InputError
from memcalc.estimation.limits import limits_of
from memcalc.estimation.outside_allocator import communication_library_bytes, least_communication_library_bytes
from memcalc.layout.stages import Stage, stages_that_matter
from memcalc.ledger.verdict import RecordedErrors, holding_memory, overcounting
from memcalc.spec.model_families.transformers_fallback import reject_without_formulas
from memcalc.spec.spec import Spec
from memcalc.states.model_states import state_sums
from memcalc.sweeping.vector_int import Numbers as Batch
from memcalc.sweeping.vector_int import elementwise
from memcalc.verdict.needs import can_replay
from memcalc.verdict.recorded_errors import reserve_ratio
from memcalc.verdict.run_types import kinds_of

Integers = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.int32]
Verdicts = npt.NDArray[np.int8]

SweepAnswer = Literal["fits", "close", "does-not-fit"]

# Verdicts as numbers in a table, in the order of ANSWERS.
FITS, CLOSE, DOES_NOT_FIT = range(3)
UNJUDGED = -1  # no GPU was given, or the configuration is invalid
AT_A_TIME = 16_384  # configurations handled at a time: they stay in the processor's cache
ANSWERS: tuple[SweepAnswer, ...] = ("fits", "close", "does-not-fit")


class VerdictTerms(NamedTuple):
    """How the verdict of a configuration is found."""

    ratio: float  # median of reserved over allocated memory of recorded runs of its kind
    errors: RecordedErrors  # the full range of these runs around the median
    replays: bool  # whether an allocator replay can decide it
    # whether the allocated peak is a lower bound: the run is not compiled, and nothing is counted too high
    bounded: bool
    overcounted: bool  # whether something is counted too high, so that nothing decides "does not fit"
    # most bytes of the allocated peak that the formulas assume and no bound contains: unsplit remainders of model
    # states. 0 if `replays` is false: then nothing more exact is known.
    remainders: int
    unmodelled: tuple[str, ...]  # requested features that need memory and are not modelled
    unmodelled_bytes: int  # a lower bound of their bytes
    communication_range: int  # by how many bytes the communication library may hold less than is counted


class TermsList:
    """The distinct terms of a grid's configurations."""

    def __init__(self) -> None:
        self._numbers: dict[VerdictTerms, int] = {}

    @property
    def terms(self) -> tuple[VerdictTerms, ...]:
        """The terms by their index."""
        return tuple(self._numbers)

    def numbers(self, batches: Mapping[str, Batch], spec: Spec) -> int | Integers:
        """Return the index of a run's terms; an array if they differ between batches.

        Args:
            batches: values of the fields of `BATCH` for each configuration. [n]
            spec: the run with any of these values.
        """
        whole = _without_limits(spec)
        if not spec.origin.limits:  # limits of the run itself are the same for all batches
            return self._number(_with_limits(whole, spec))
        found = elementwise(lambda some: {"": self._number(_with_limits(whole, spec.with_training(**some)))}, batches)
        numbers: int | Integers = found[""]
        return numbers

    def _number(self, terms: VerdictTerms) -> int:
        return self._numbers.setdefault(terms, len(self._numbers))


def _without_limits(spec: Spec) -> VerdictTerms:
    ratio, errors = reserve_ratio(kinds_of(spec), compiled=spec.training.compile)
    replays = can_replay(spec)
    bounded = not spec.training.compile
    remainders = _remainders(spec) if replays else 0
    communication = communication_library_bytes(spec) - least_communication_library_bytes(spec)
    return VerdictTerms(ratio, errors, replays, bounded, False, remainders, (), 0, communication)


def _with_limits(terms: VerdictTerms, spec: Spec) -> VerdictTerms:
    limits = limits_of(spec)
    missing, overcounted = holding_memory(limits), bool(overcounting(limits))
    return terms._replace(
        bounded=terms.bounded and not overcounted,
        overcounted=overcounted,
        unmodelled=tuple(limit.feature for limit in missing),
        unmodelled_bytes=sum(limit.at_least_bytes for limit in missing),
    )


def _remainders(spec: Spec) -> int:
    """Return the bytes of unsplit remainders of model states in the phase and the stage that have most of them."""
    found: dict[tuple[Stage, str], int] = {}
    try:
        reject_without_formulas(spec)
        for stage in stages_that_matter(spec):
            exact = state_sums(spec, stage, tails=False)
            for (phase, component), amount in state_sums(spec, stage).items():
                beyond = amount - exact.get((phase, component), 0)
                found[stage, phase] = found.get((stage, phase), 0) + beyond
    except InputError:  # not modelled, so there is no estimate either
        return 0
    return max(found.values(), default=0)


class JudgedPeaks(NamedTuple):
    """Reserved memory and verdicts that follow from allocated peaks."""

    reserved_bytes: Integers  # allocated peak times the median ratio of recorded runs. [n]
    verdict: Verdicts  # indices into `ANSWERS`. [n]


def verdicts(
    peak: Integers, outside: Integers, usable: Integers, numbers: Numbers, terms: tuple[VerdictTerms, ...]
) -> JudgedPeaks:
    """Return verdicts as in `memcalc.verdict.needs.recorded_need`, except for configurations that can be replayed.

    Only a lower bound decides "does not fit", which no replay contradicts, and for compiled runs the ratio.

    Args:
        peak: allocated bytes of the rank with the highest peak. [n]
        outside: bytes of the CUDA context and the communication library. [n]
        usable: usable bytes of the GPU; -1: no GPU was given. [n]
        numbers: index of each configuration's terms. [n]
        terms: the terms by their index.
    """
    reserved, verdict = np.empty_like(peak), np.empty(len(peak), dtype=np.int8)
    several = len(terms) > 1
    for start in range(0, len(peak), AT_A_TIME):
        some = slice(start, start + AT_A_TIME)
        numbers_of = numbers[some] if several else numbers
        reserved[some], verdict[some] = _verdict(peak[some], usable[some] - outside[some], numbers_of, terms)
    no_card = usable < 0
    if no_card.any():
        verdict[no_card] = UNJUDGED
    return JudgedPeaks(reserved, verdict)


def _verdict(
    peak: Integers, room: Integers, numbers: Numbers, terms: tuple[VerdictTerms, ...]
) -> tuple[npt.NDArray[np.float64], Verdicts]:
    """Return reserved bytes and verdicts; `room` is usable bytes minus bytes outside the allocator."""
    reserved = np.ceil(peak * of_each([each.ratio for each in terms], numbers))
    fits = reserved * of_each([1 + each.errors.high for each in terms], numbers) <= room
    if any(each.unmodelled for each in terms):
        fits &= of_each([not each.unmodelled for each in terms], numbers)
    room = room + of_each([each.communication_range - each.unmodelled_bytes for each in terms], numbers)
    beyond = peak - of_each([each.remainders for each in terms], numbers) > room
    if not all(each.bounded for each in terms):
        beyond &= of_each([each.bounded for each in terms], numbers)
    by_ratio = [not (each.replays or each.overcounted or each.bounded) for each in terms]
    if any(by_ratio):
        low = reserved * of_each(
            [1 + each.errors.low if decides else 0.0 for each, decides in zip(terms, by_ratio, strict=True)], numbers
        )
        beyond |= low >= room + 1
    # A configuration is never both: FITS is CLOSE - 1, and DOES_NOT_FIT is CLOSE + 1.
    return reserved, CLOSE - fits.view(np.int8) + beyond.view(np.int8)


def of_each(values: list[Any], numbers: Numbers) -> Any:
    """Return the value of each configuration by the index of its terms; a single value if all are equal."""
    if len(set(values)) > 1:
        return np.array(values)[numbers]
    return values[0] if values else 0  # no configuration is valid
