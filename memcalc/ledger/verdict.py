"""The answer to "does it fit?": fits, does not fit, or cannot say, with the interval that it rests on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from memcalc.spec.limits import Limit

Answer = Literal["fits", "does-not-fit", "unknown"]

# How the bounds of a need were found: both ends proven, the run replayed through the allocator, or the allocated peak
# times what recorded runs reserved for theirs.
Basis = Literal["bounds", "replay", "records"]


class Errors(NamedTuple):
    """How far recorded runs of one kind lay from their estimates, as fractions of the reserved memory estimated.

    Args:
        kind: of runs, such as "one GPU, LoRA".
        runs: how many were recorded; 0: none, and `low` and `high` are a convention.
        median: of the absolute errors.
        worst: the error that is farthest from 0.
        low: the lower end that the verdict uses, at most 0.
        high: its upper end, at least 0.
        replayed: whether the estimates were allocator replays; else ratios of reserved to allocated memory.
    """

    kind: str
    runs: int
    median: float
    worst: float
    low: float
    high: float
    replayed: bool


class Interval(NamedTuple):
    """Where device memory of a run lies, by the errors of recorded runs of its kind. Bytes.

    Args:
        low_bytes: its lower end.
        high_bytes: its upper end.
        errors: of these runs.
    """

    low_bytes: int
    high_bytes: int
    errors: Errors


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is said of a run on a device. Bytes.

    Args:
        answer: fits, does not fit, or unknown: the device's memory lies inside the interval, or something that holds
            memory is asked for and not modelled.
        least_bytes: what the run needs at least, with what is known of the parts that are not modelled.
        device_bytes: the best estimate of what it needs; None where bounds alone decided.
        limit_bytes: what the device (or a budget) has.
        interval: around the best estimate of device memory; None where bounds alone decided.
        expected: whether the run is expected to get through: by its replay, errors aside; where it was not replayed,
            whether it fits.
        assumed: whether the run does not fit as it is counted, and may with another candidate for what its file leaves
            open.
        unmodelled: what holds memory, is asked for and is not modelled, the largest known part first.
    """

    answer: Answer
    least_bytes: int
    device_bytes: int | None
    limit_bytes: int
    interval: Interval | None
    expected: bool
    unmodelled: tuple[str, ...] = ()
    assumed: bool = False

    @property
    def needed_bytes(self) -> int:
        """The best estimate of what the run needs; the lower bound where there is none, or where parts are missing."""
        return self.least_bytes if self.device_bytes is None else max(self.device_bytes, self._known_bytes)

    @property
    def _known_bytes(self) -> int:
        return self.least_bytes if self.unmodelled else 0

    @property
    def fits(self) -> bool | None:
        """True, False, or None for unknown."""
        return {"fits": True, "does-not-fit": False, "unknown": None}[self.answer]


def observed(fits: bool, device_bytes: int, limit_bytes: int, limits: Iterable[Limit]) -> Verdict:
    """The verdict of a run that was traced or measured: what it held is known, what it does not contain is not.

    Args:
        fits: whether the run got through.
        device_bytes: what it held of the device.
        limit_bytes: what the device has.
        limits: what the run leaves out.
    """
    unmodelled = holding_memory(limits)
    more = sum(limit.at_least_bytes for limit in unmodelled)
    answer: Answer = "fits" if fits else "does-not-fit"
    if fits and unmodelled:
        answer = "does-not-fit" if device_bytes + more > limit_bytes else "unknown"
    missing = tuple(limit.what for limit in unmodelled)
    return Verdict(
        answer, device_bytes + more, device_bytes, limit_bytes, None, fits and answer != "does-not-fit", missing
    )


def holding_memory(limits: Iterable[Limit]) -> tuple[Limit, ...]:
    """What holds memory and is not modelled, the largest known part first."""
    found = (limit for limit in limits if limit.holds_memory)
    return tuple(sorted(found, key=lambda limit: -limit.at_least_bytes))
