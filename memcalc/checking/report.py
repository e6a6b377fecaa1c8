"""Result of `check`: one outcome per config, and the exit code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

BUDGET = "the budget"  # what sets the limit where no card is smaller

Status = Literal["fits", "does not fit", "unknown", "grew", "broken"]


class Sizes(NamedTuple):
    """Memory of the rank that needs most, in bytes; None without a GPU."""

    name: str
    allocated: int
    reserved: int | None
    device: int | None
    peak_phase: str
    rank: dict[str, int]
    gpu: str | None

    def of(self, basis: str) -> int | None:
        """One of the three numbers by its name."""
        return {"allocated": self.allocated, "reserved": self.reserved, "device": self.device}.get(basis)


class Growth(NamedTuple):
    """A peak and that of the baseline, in bytes."""

    baseline: int
    difference: int
    allowed: int | None  # None: any


class Outcome(NamedTuple):
    """One config checked against the smaller of its GPU and the budget, or why it is invalid."""

    path: str
    status: Status
    sizes: Sizes | None = None
    needed_bytes: int | None = None
    basis: str = ""  # which number is compared: "device", "reserved" or "allocated"
    limit_bytes: int | None = None  # what must not be exceeded: less the margin
    limit: str = ""  # what sets the limit, in words
    margin_bytes: int = 0
    growth: Growth | None = None  # None: no baseline, or none of this configuration
    message: str = ""  # what is wrong with an invalid one
    line: int | None = None  # where in the file, if that is known
    notes: tuple[str, ...] = ()  # what else to know: how another framework's file was read, and what of it was not
    is_bound: bool = False  # whether needed_bytes is a lower bound, and the run needs more
    interval: tuple[int, int] | None = None  # of device memory, by recorded runs; None where bounds decided
    unmodelled: tuple[str, ...] = ()  # features of the run that need memory and are not modelled


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The outcomes in the order in which the files were found.

    Args:
        outcomes: one for each configuration.
        skipped: how many other files there were.
        budget_bytes: the budget that was asked for, for all.
        compared: whether there was a baseline.
        gone: configurations of the baseline that were not found any more.
        may_be_empty: whether nothing to check is well, too.
        remarks: what of the question came to nothing.
        accepts_unknown: whether a configuration of which it cannot be said passes.
    """

    outcomes: tuple[Outcome, ...]
    skipped: int
    budget_bytes: int | None
    compared: bool = False
    gone: tuple[str, ...] = ()
    may_be_empty: bool = False
    remarks: tuple[str, ...] = ()
    accepts_unknown: bool = False

    def fails(self, outcome: Outcome) -> bool:
        """Whether a configuration makes the check fail."""
        return outcome.status != "fits" and not (outcome.status == "unknown" and self.accepts_unknown)

    def count(self, status: Status) -> int:
        """How many configurations ended so."""
        return sum(outcome.status == status for outcome in self.outcomes)

    @property
    def exit_code(self) -> int:
        """Return 2 if a file is invalid or there is nothing to check, else 1 if one fails, else 0."""
        if self.count("broken") or not (self.outcomes or self.may_be_empty):
            return 2
        return 1 if any(map(self.fails, self.outcomes)) else 0
