"""A report against the configuration of its run: what was held at that moment, and which changes fit."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor
from typing import NamedTuple

from memcalc.changes.candidates import RESULTS, candidates
from memcalc.changes.finding import Change, Finder
from memcalc.changes.run import Run
from memcalc.diagnosis.accounting import Account
from memcalc.diagnosis.report import LABELS, Report
from memcalc.diagnosis.sizes import NOTHING
from memcalc.estimation.estimate import estimate
from memcalc.estimation.limits import limits_of
from memcalc.estimation.outside import communication_library_bytes, outside_bytes
from memcalc.ledger.component import Component
from memcalc.ledger.ledger import Ledger
from memcalc.ledger.result import Result
from memcalc.ledger.verdict import Errors, holding_memory
from memcalc.verdict.needs import Need, least_bytes, need_of


@dataclass(frozen=True, slots=True)
class Explained:
    """A report against the ledger of its run. Bytes.

    Args:
        result: the estimate.
        phase: the moment in which the run failed, as far as the traceback or the figures tell.
        allocated: what the ledger holds then.
        components: the same by component.
        held: what the run had allocated, with what it asked for; None where the message does not say.
        unexplained: how much of that the ledger does not know of.
        budget: what the allocator could have held; None where nothing tells.
        budget_source: what says so.
        needed: what the allocator would have had to reserve for the whole step, by its replay where there is one, with
            what is unexplained.
        changes: those that save memory: first those that fit, by what they ask for; then those of which nothing can be
            said; then those that do not fit.
        notes: what to know before one believes this.
    """

    result: Result
    phase: str
    allocated: int
    components: dict[Component, int]
    held: int | None
    unexplained: int
    budget: int | None
    budget_source: str
    needed: Reserved
    changes: tuple[Change, ...]
    notes: tuple[str, ...]


class Reserved(NamedTuple):
    """What the allocator reserves for a run at most, with what is unexplained. Bytes.

    Args:
        bytes: the best estimate.
        low_bytes: the lower end of its interval.
        high_bytes: the upper end.
        errors: of recorded runs of its kind, which the interval rests on.
    """

    bytes: int
    low_bytes: int
    high_bytes: int
    errors: Errors

    def fits(self, budget: int) -> bool | None:
        """Whether that is within a budget; None: the budget is inside the interval."""
        if self.high_bytes <= budget:
            return True
        return False if self.low_bytes > budget else None


def explain(run: Run, report: Report, account: Account) -> Explained:
    """The ledger at the failing moment, and the changes that would have avoided it."""
    result = estimate(run.spec)
    ledger = result.ledger
    held = None
    if account.live is not None and account.asked is not None:
        held = account.live.bytes + (account.private or NOTHING).bytes + account.asked.bytes
    phase = failing_phase(ledger, report.phase, held)
    unexplained = max(0, (held or 0) - ledger.totals[phase])
    budget, source = _budget(report, account, result)
    needed = _reserved(need_of(run.spec, None, ledger.peak_bytes), unexplained)
    changes = _changes(run, ledger.peak_bytes, unexplained, budget)
    return Explained(
        result=result,
        phase=phase,
        allocated=ledger.totals[phase],
        components=ledger.components(phase),
        held=held,
        unexplained=unexplained,
        budget=budget,
        budget_source=source,
        needed=needed,
        changes=changes,
        notes=tuple(_notes(report, result, held, unexplained, fits=None if budget is None else needed.fits(budget))),
    )


def failing_phase(ledger: Ledger, hint: str, held: int | None) -> str:
    """The first phase that needs as much as the run held, of those that the traceback points to; else the highest."""
    phases = [phase for phase in ledger.phases if phase.rstrip("_0123456789") == hint] or list(ledger.phases)
    if held is not None:
        for phase in phases:
            if ledger.totals[phase] >= held:
                return phase
    return max(phases, key=ledger.totals.__getitem__)


def _budget(report: Report, account: Account, result: Result) -> tuple[int | None, str]:
    """What the allocator could have held: what it had and what it could still get, everything else as it was."""
    held = report.figures.reserved
    if held is None and account.live is not None:
        held = account.live.plus(account.cached or NOTHING)
    if held is not None and account.room is not None:
        return held.bytes + account.room.bytes, "what the allocator held and what it could still have got"
    if result.card is None:
        return None, ""
    usable = result.card.usable_bytes - outside_bytes(result.spec, result.card)
    return usable, f"what {result.card.name} leaves beside the context and NCCL"


def _reserved(need: Need, unexplained: int) -> Reserved:
    """What a run reserves where nothing limits it, with what the ledger does not know of."""
    low, high = floor(need.reserved_bytes * (1 + need.errors.low)), ceil(need.reserved_bytes * (1 + need.errors.high))
    return Reserved(need.reserved_bytes + unexplained, low + unexplained, high + unexplained, need.errors)


def _changes(run: Run, peak: int, unexplained: int, budget: int | None) -> tuple[Change, ...]:
    """What fits, by what it asks for: single changes and pairs; then what may fit; then what does not."""
    communication = communication_library_bytes(run.spec)

    def judge(result: Result) -> tuple[int, bool | None]:
        """What a change needs, at least where a bound is beyond the budget: such a change takes no replay."""
        spec = result.spec
        # Groups of ranks that the run did not have take what the allocator could have got.
        extra = unexplained + max(communication_library_bytes(spec) - communication, 0)
        if budget is not None:
            around = outside_bytes(spec, None)
            least = least_bytes(spec, None, budget - extra + around) - around + extra
            if least > budget:
                return least, False
        reserved = _reserved(need_of(spec, None, result.ledger.peak_bytes), extra)
        fits = None if budget is None else reserved.fits(budget)
        # What is not modelled is unknown, unless the run shows what it held beyond the ledger.
        unknown = not unexplained and holding_memory(limits_of(spec))
        return reserved.bytes, None if fits and unknown else fits

    finder = Finder(run, candidates(run.spec), peak, judge)
    singles = finder.singles()
    fitting = [change for change in singles if change.fits]
    if budget is not None:
        fitting += finder.pairs()
    fitting.sort(key=lambda change: (RESULTS.index(change.result), len(change.levers)))
    uncertain = [change for change in singles if change.fits is None]
    return (*fitting, *uncertain, *(change for change in singles if change.fits is False))


def _notes(report: Report, result: Result, held: int | None, unexplained: int, *, fits: bool | None) -> list[str]:
    notes = []
    if report.framework not in ("pytorch", "driver"):
        notes.append(f"the ledger is of PyTorch's step; the message is of {LABELS[report.framework]}")
    if held is None:
        notes.append("the message does not say what was allocated: the ledger stands alone")
    if unexplained:
        notes.append(
            "the run held more than the ledger knows of at that moment: what it does not model, or another "
            "configuration than this one; it is added to what every change needs"
        )
    if fits:
        notes.append("by this estimate the run should have fitted: see the cause above, or check the configuration")
    if result.spec.parallelism.pipeline_parallel > 1:
        notes.append("the ledger is of the stage that needs most, which need not be the one that failed")
    return notes
