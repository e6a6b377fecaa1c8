"""What `check` returns: one outcome for each configuration, and the exit code they add up to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from memcalc.ledger.result import Result

BUDGET = "the budget"  # what sets the limit where no card is smaller

Status = Literal["fits", "does not fit", "broken"]


class Outcome(NamedTuple):
    """One configuration, sized against the smaller of its card and the budget; or why it could not be."""

    path: str
    status: Status
    result: Result | None = None
    needed_bytes: int | None = None
    basis: str = ""  # which number is compared: "device", "reserved" or "allocated"
    limit_bytes: int | None = None
    limit: str = ""  # what sets the limit, in words
    message: str = ""  # what is wrong with a broken one
    line: int | None = None  # where in the file, if that is known


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The outcomes in the order in which the files were found."""

    outcomes: tuple[Outcome, ...]
    skipped: int  # files in folders that are no configurations
    budget_bytes: int | None

    def count(self, status: Status) -> int:
        """How many configurations ended so."""
        return sum(outcome.status == status for outcome in self.outcomes)

    @property
    def exit_code(self) -> int:
        """2 where a file is broken or there is nothing to check, else 1 where one does not fit, else 0."""
        if self.count("broken") or not self.outcomes:
            return 2
        return 1 if self.count("does not fit") else 0
