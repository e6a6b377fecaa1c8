"""An out-of-memory report with the configuration of its run: the estimate at the failure, and changes that fit."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor
from typing import NamedTuple

from memcalc.diagnosis.accounting import Account
from memcalc.diagnosis.report import LABELS, OutOfMemoryReport
from memcalc.diagnosis.sizes import NOTHING
from memcalc.estimation.estimate import estimate
from memcalc.estimation.limits import limits_of
from memcalc.estimation.outside_allocator import (
    communication_library_bytes,
    least_communication_library_bytes,
    outside_bytes,
)
from memcalc.ledger.component import Component
from memcalc.ledger.ledger import Ledger
from memcalc.ledger.result import Result
from memcalc.ledger.verdict import RecordedErrors, holding_memory, overcounting
from memcalc.suggestions.candidates import RESULTS, candidates
from memcalc.suggestions.change_search import ChangeSearch, SuggestedChange
from memcalc.suggestions.run_overrides import UserRun
from memcalc.verdict.needs import MemoryNeed, least_bytes, need_of
from memcalc.verdict.other_candidates import other_candidates


@dataclass(frozen=True, slots=True)
class ExplainedReport:
    """An out-of-memory report with the ledger of its run. Bytes."""

    result: Result  # the estimate
    phase: str  # the phase in which the run failed, from the traceback or the figures
    allocated: int  # the ledger's allocated bytes in that phase
    components: dict[Component, int]  # the same by component
    run_bytes: int | None  # allocated plus requested bytes of the run; None if the message lacks them
    unexplained: int  # the part of `run_bytes` that the ledger does not contain
    budget: int | None  # what the allocator could have reserved; None if unknown
    budget_source: str  # where the budget comes from
    needed: ReservedMemory  # reserved memory of the whole step, from its replay if there is one, plus `unexplained`
    # changes that save memory: those that fit, by kind of result; then uncertain ones; then those that do not fit
    changes: tuple[SuggestedChange, ...]
    notes: tuple[str, ...]  # caveats


class ReservedMemory(NamedTuple):
    """Reserved memory of a run, unexplained memory included. Bytes."""

    bytes: int  # the best estimate
    low_bytes: int  # the lower end of its interval
    high_bytes: int  # the upper end
    errors: RecordedErrors  # of recorded runs of its kind, on which the interval is based

    def fits(self, budget: int) -> bool | None:
        """Return whether it is within a budget; None if the budget is inside the interval."""
        if self.high_bytes <= budget:
            return True
        return False if self.low_bytes > budget else None


def explain(run: UserRun, report: OutOfMemoryReport, account: Account) -> ExplainedReport:
    """Return the estimate at the point of failure, and the changes that avoid it."""
    result = estimate(run.spec)
    ledger = result.ledger
    run_bytes = None
    if account.live is not None and account.requested is not None:
        run_bytes = account.live.bytes + (account.private or NOTHING).bytes + account.requested.bytes
    phase = failing_phase(ledger, report.phase, run_bytes)
    unexplained = max(0, (run_bytes or 0) - ledger.totals[phase])
    budget, source = _budget(report, account, result)
    needed = _reserved(need_of(run.spec, None, ledger.peak_bytes), unexplained)
    changes = _changes(run, ledger.peak_bytes, unexplained, budget)
    return ExplainedReport(
        result=result,
        phase=phase,
        allocated=ledger.totals[phase],
        components=ledger.components(phase),
        run_bytes=run_bytes,
        unexplained=unexplained,
        budget=budget,
        budget_source=source,
        needed=needed,
        changes=changes,
        notes=tuple(
            _notes(report, result, run_bytes, unexplained, fits=None if budget is None else needed.fits(budget))
        ),
    )


def failing_phase(ledger: Ledger, hint: str, run_bytes: int | None) -> str:
    """Return the first phase that needs as much as the run used, among those of the traceback; else the peak."""
    phases = [phase for phase in ledger.phases if phase.rstrip("_0123456789") == hint] or list(ledger.phases)
    if run_bytes is not None:
        for phase in phases:
            if ledger.totals[phase] >= run_bytes:
                return phase
    return max(phases, key=ledger.totals.__getitem__)


def _budget(report: OutOfMemoryReport, account: Account, result: Result) -> tuple[int | None, str]:
    """Return the budget of the allocator: what it held plus what it could still reserve."""
    run_bytes = report.figures.reserved
    if run_bytes is None and account.live is not None:
        run_bytes = account.live.plus(account.cached or NOTHING)
    if run_bytes is not None and account.available is not None:
        return run_bytes.bytes + account.available.bytes, "reserved by the allocator, plus what it could still reserve"
    if result.gpu is None:
        return None, ""
    usable = result.gpu.usable_bytes - outside_bytes(result.spec, result.gpu)
    return usable, f"usable memory of {result.gpu.name}, less context and NCCL"


def _reserved(need: MemoryNeed, unexplained: int) -> ReservedMemory:
    """Return what a run reserves without a limit, plus unexplained memory."""
    low, high = floor(need.reserved_bytes * (1 + need.errors.low)), ceil(need.reserved_bytes * (1 + need.errors.high))
    return ReservedMemory(need.reserved_bytes + unexplained, low + unexplained, high + unexplained, need.errors)


def _changes(run: UserRun, peak: int, unexplained: int, budget: int | None) -> tuple[SuggestedChange, ...]:
    """Return changes that fit, then those that may fit, then those that do not."""
    communication = communication_library_bytes(run.spec)
    least_communication = least_communication_library_bytes(run.spec)

    def judge(result: Result) -> tuple[int, bool | None]:
        """Return what a change needs; a lower bound, without a replay, if that exceeds the budget."""
        spec = result.spec
        # Communication groups that the original run did not have reduce the allocator's memory.
        extra = unexplained + max(communication_library_bytes(spec) - communication, 0)
        if budget is not None:
            around = least_communication_library_bytes(spec)
            beyond = unexplained + max(around - least_communication, 0) - around
            least = least_bytes(spec, None, budget - beyond) + beyond
            if least > budget:
                return least, False
        reserved = _reserved(need_of(spec, None, result.ledger.peak_bytes), extra)
        fits = None if budget is None else reserved.fits(budget)
        if budget is not None and fits:  # only if other candidates of open choices do, too
            others = (_reserved(need_of(each, None), extra).fits(budget) for each in other_candidates(spec))
            fits = True if all(others) else None
        # Features that are not modelled make the result unknown, unless the message shows the memory beyond the
        # estimate.
        limits = limits_of(spec)
        unknown = (not unexplained and holding_memory(limits)) if fits else overcounting(limits)
        return reserved.bytes, None if unknown else fits

    finder = ChangeSearch(run, candidates(run.spec), peak, judge)
    singles = finder.singles()
    fitting = [change for change in singles if change.fits]
    if budget is not None:
        fitting += finder.pairs()
    fitting.sort(key=lambda change: (RESULTS.index(change.result), len(change.levers)))
    uncertain = [change for change in singles if change.fits is None]
    return (*fitting, *uncertain, *(change for change in singles if change.fits is False))


def _notes(
    report: OutOfMemoryReport, result: Result, run_bytes: int | None, unexplained: int, *, fits: bool | None
) -> list[str]:
    notes = []
    if report.framework not in ("pytorch", "driver"):
        notes.append(f"the estimate is of a PyTorch step; the message is from {LABELS[report.framework]}")
    if run_bytes is None:
        notes.append("the message lacks allocated memory, so the estimate cannot be compared")
    if unexplained:
        notes.append(
            "the run used more than estimated at that point, because of features that are not modelled or a different "
            "configuration; the difference is added to the needs of every change"
        )
    if fits:
        notes.append("by this estimate the run fits: see the cause above, or check the configuration")
    if result.spec.parallelism.pipeline_parallel > 1:
        notes.append("the estimate is of the stage with the highest peak, which may not be the stage that failed")
    return notes
