"""What `check` returns: one outcome for each configuration, and the exit code they add up to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

BUDGET = "the budget"  # what sets the limit where no card is smaller

Status = Literal["fits", "does not fit", "grew", "broken"]
STATUSES: tuple[Status, ...] = ("fits", "does not fit", "grew", "broken")


class Sizes(NamedTuple):
    """What a configuration needs on its worst rank. Bytes; None where no card says it."""

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
    """A peak beside that of the baseline. Bytes."""

    baseline: int
    difference: int
    allowed: int | None  # None: any


class Outcome(NamedTuple):
    """One configuration, sized against the smaller of its card and the budget; or why it could not be."""

    path: str
    status: Status
    sizes: Sizes | None = None
    needed_bytes: int | None = None
    basis: str = ""  # which number is compared: "device", "reserved" or "allocated"
    limit_bytes: int | None = None  # what must not be exceeded: less the margin
    limit: str = ""  # what sets the limit, in words
    margin_bytes: int = 0
    growth: Growth | None = None  # None: no baseline, or none of this configuration
    message: str = ""  # what is wrong with a broken one
    line: int | None = None  # where in the file, if that is known
    notes: tuple[str, ...] = ()  # what else to know: how another framework's file was read, and what of it was not


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
    """

    outcomes: tuple[Outcome, ...]
    skipped: int
    budget_bytes: int | None
    compared: bool = False
    gone: tuple[str, ...] = ()
    may_be_empty: bool = False
    remarks: tuple[str, ...] = ()

    def count(self, status: Status) -> int:
        """How many configurations ended so."""
        return sum(outcome.status == status for outcome in self.outcomes)

    @property
    def exit_code(self) -> int:
        """2 where a file is broken or there is nothing to check, else 1 where one does not fit or grew, else 0."""
        if self.count("broken") or not (self.outcomes or self.may_be_empty):
            return 2
        return 1 if self.count("does not fit") or self.count("grew") else 0
