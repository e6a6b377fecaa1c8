"""The verdict on a run: fits, does not fit, or unknown, with the interval it is based on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from memcalc.spec.limits import Limit

Answer = Literal["fits", "does-not-fit", "unknown"]


class RecordedErrors(NamedTuple):
    """Errors of the estimates of recorded runs of one kind, as fractions of the estimated reserved memory."""

    run_type: str  # type of runs, for example "one GPU, LoRA"
    runs: int  # number of recorded runs; if 0, `low` and `high` are a convention
    median: float  # median absolute error
    worst: float  # the error farthest from 0
    low: float  # lower bound of the error that the verdict uses, at most 0
    high: float  # upper bound of the error that the verdict uses, at least 0
    replayed: bool  # whether the estimates were allocator replays; otherwise ratios of reserved to allocated memory


class Interval(NamedTuple):
    """The expected range of a run's device memory. Bytes.

    It comes from the errors of recorded runs of its kind, and from the least and the most of the communication library.
    """

    low_bytes: int  # lower end of the range
    high_bytes: int  # upper end of the range
    errors: RecordedErrors  # of these recorded runs
    is_late: bool = False  # whether the upper end is that of a replay with late CUDA streams, which reserves more
    of_candidates: bool = False  # whether the upper end is that of another candidate of an open choice


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a run on one device. Bytes."""

    # fits, does not fit, or unknown. It is unknown if the device's memory is inside the interval, or if the run
    # requests something that holds memory and is not modelled.
    answer: Answer
    least_bytes: int  # lower bound of the memory needed, including the known minimum of parts that are not modelled
    device_bytes: int | None  # best estimate of the memory needed; None if bounds alone decided
    limit_bytes: int  # memory of the device, or the budget
    interval: Interval | None  # around the best estimate of device memory; None if bounds alone decided
    # whether the run is expected to finish: according to its replay, ignoring errors. For a run without a replay,
    # whether it fits.
    expected: bool
    # requested features that hold memory and are not modelled, the largest known minimum first
    unmodelled: tuple[str, ...] = ()
    # whether the run does not fit as counted, but may fit with another value for what its config leaves open
    assumed: bool = False
    # features that are not modelled, and without which the run would not fit; with them it may
    overcounted: tuple[str, ...] = ()

    @property
    def needed_bytes(self) -> int:
        """Best estimate of the memory needed in bytes; the lower bound if there is none or parts are not modelled."""
        return self.least_bytes if self.device_bytes is None else max(self.device_bytes, self._known_bytes)

    @property
    def _known_bytes(self) -> int:
        return self.least_bytes if self.unmodelled else 0

    @property
    def fits(self) -> bool | None:
        """True, False, or None for unknown."""
        return {"fits": True, "does-not-fit": False, "unknown": None}[self.answer]


def observed(fits: bool, device_bytes: int, limit_bytes: int, limits: Iterable[Limit]) -> Verdict:
    """Return the verdict on a traced or measured run: its own memory is known, the memory of its limits is not.

    Args:
        fits: whether the run finished.
        device_bytes: device memory that the run held.
        limit_bytes: memory of the device.
        limits: what the run does not contain.
    """
    unmodelled = holding_memory(limits)
    more = sum(limit.at_least_bytes for limit in unmodelled)
    overcounted = () if fits else tuple(limit.feature for limit in overcounting(limits))
    answer: Answer = "fits" if fits else "unknown" if overcounted else "does-not-fit"
    if fits and unmodelled:
        answer = "does-not-fit" if device_bytes + more > limit_bytes else "unknown"
    return Verdict(
        answer,
        0 if overcounted else device_bytes + more,
        device_bytes,
        limit_bytes,
        None,
        fits and answer != "does-not-fit",
        tuple(limit.feature for limit in unmodelled),
        overcounted=overcounted,
    )


def overcounting(limits: Iterable[Limit]) -> tuple[Limit, ...]:
    """Return the limits because of which the estimate is perhaps too high."""
    return tuple(limit for limit in limits if limit.overcounts != "nothing")


def holding_memory(limits: Iterable[Limit]) -> tuple[Limit, ...]:
    """Return the limits that hold memory, the largest known minimum first."""
    found = (limit for limit in limits if limit.holds_memory)
    return tuple(sorted(found, key=lambda limit: -limit.at_least_bytes))
