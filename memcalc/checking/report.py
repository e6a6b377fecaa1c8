"""Result of `check`: one outcome per config, and the exit code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from memcalc.jupyter import NotebookDisplay
from memcalc.ledger.result import Result

BUDGET = "the budget"  # what sets the limit if the GPU is larger, or not named

Status = Literal["fits", "does not fit", "unknown", "grew", "broken"]
Describe: TypeAlias = Callable[[Result], Any]  # a complete estimate as plain data, for a report


class Sizes(NamedTuple):
    """Memory of the rank with the highest peak, in bytes; None if a bound alone decided."""

    name: str
    allocated: int
    reserved: int | None
    device: int | None
    peak_phase: str
    rank: dict[str, int]
    gpu: str | None

    def of(self, basis: str) -> int | None:
        """Return "allocated", "reserved" or "device" bytes by name; None for any other name."""
        return {"allocated": self.allocated, "reserved": self.reserved, "device": self.device}.get(basis)


class PeakGrowth(NamedTuple):
    """A peak and its change from the baseline, in bytes."""

    baseline: int
    difference: int
    allowed: int | None  # None: any growth


class CheckOutcome(NamedTuple):
    """One config checked against the smaller of its GPU and the budget, or why it is invalid."""

    path: str
    status: Status
    sizes: Sizes | None = None
    needed_bytes: int | None = None
    basis: str = ""  # the compared number: "device"
    limit_bytes: int | None = None  # the limit minus the margin
    limit: str = ""  # what sets the limit, for messages
    margin_bytes: int = 0
    growth: PeakGrowth | None = None  # None: no baseline, or no such config in it
    message: str = ""  # the error of an invalid config
    line: int | None = None  # line of the error in the file, if known
    notes: tuple[str, ...] = ()  # how another framework's file was read, and what it does not model
    is_bound: bool = False  # whether needed_bytes is a lower bound, so that the run needs more
    interval: tuple[int, int] | None = None  # of device memory, from recorded runs; None if bounds decided
    unmodelled: tuple[str, ...] = ()  # features of the run that need memory and are not modelled
    description: Any = None  # what `describe` made of the estimate; None for configs that were not described

    @property
    def filled(self) -> float:
        """Return the fraction of its limit that the config needs; 0 without a limit."""
        return (self.needed_bytes or 0) / self.limit_bytes if self.limit_bytes else 0.0


def urgency(outcome: CheckOutcome) -> tuple[bool, float]:
    """Return a sort key: configs that do not fit come first, in each group the closest to their limit."""
    return outcome.status == "fits", abs(outcome.filled - 1)


@dataclass(frozen=True, slots=True)
class CheckReport(NotebookDisplay):
    """The outcomes in the order in which the files were found.

    Args:
        outcomes: one per config.
        skipped: number of files that are not configs.
        budget_bytes: the budget given for all files.
        compared: whether there was a baseline.
        missing: configs of the baseline that were not found.
        may_be_empty: whether a check without any config passes.
        remarks: inputs that had no effect.
        accepts_unknown: whether a config with an unknown verdict passes.
    """

    outcomes: tuple[CheckOutcome, ...]
    skipped: int
    budget_bytes: int | None
    compared: bool = False
    missing: tuple[str, ...] = ()
    may_be_empty: bool = False
    remarks: tuple[str, ...] = ()
    accepts_unknown: bool = False

    def __repr__(self) -> str:
        """Return the number of configs by status, in one line."""
        counted = [(status, self.count(status)) for status in get_args(Status)]
        found = ", ".join(f"{number} {status}" for status, number in counted if number)
        return f"<CheckReport of {len(self.outcomes)} configs: {found or 'none'}>"

    def fails(self, outcome: CheckOutcome) -> bool:
        """Return whether a config makes the check fail."""
        return outcome.status != "fits" and not (outcome.status == "unknown" and self.accepts_unknown)

    def count(self, status: Status) -> int:
        """Return the number of configs with this status."""
        return sum(outcome.status == status for outcome in self.outcomes)

    @property
    def exit_code(self) -> int:
        """Return 2 if a file is invalid or there is nothing to check, else 1 if one fails, else 0."""
        if self.count("broken") or not (self.outcomes or self.may_be_empty):
            return 2
        return 1 if any(map(self.fails, self.outcomes)) else 0
