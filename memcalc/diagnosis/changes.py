"""A report against the configuration of its run: what was held at that moment, and which changes fit."""

from __future__ import annotations

from dataclasses import dataclass

from memcalc.changes.candidates import RESULTS, candidates
from memcalc.changes.finding import Change, Finder
from memcalc.changes.run import Run
from memcalc.diagnosis.accounting import Account
from memcalc.diagnosis.report import LABELS, Report
from memcalc.diagnosis.sizes import NOTHING
from memcalc.estimation.estimate import estimate
from memcalc.estimation.outside import reserved_bytes
from memcalc.ledger.component import Component
from memcalc.ledger.ledger import Ledger
from memcalc.ledger.result import Result


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
        needed: what it would have needed at the estimated peak.
        changes: those that save memory: first those that fit, by what they ask for.
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
    needed: int
    changes: tuple[Change, ...]
    notes: tuple[str, ...]


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
        needed=reserved_bytes(ledger.peak_bytes + unexplained),
        changes=changes,
        notes=tuple(_notes(report, result, held, unexplained, budget)),
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
    headline = result.headline
    if result.card is not None and headline.device_bytes is not None and headline.reserved_bytes is not None:
        around = headline.device_bytes - headline.reserved_bytes
        return result.card.usable_bytes - around, f"what {result.card.name} leaves beside the context and NCCL"
    return None, ""


def _changes(run: Run, peak: int, unexplained: int, budget: int | None) -> tuple[Change, ...]:
    """What fits, by what it asks for: single changes, and pairs of what is not enough alone; then what does not fit."""

    def judge(result: Result) -> tuple[int, bool | None]:
        needed = reserved_bytes(result.ledger.peak_bytes + unexplained)
        return needed, None if budget is None else needed <= budget

    finder = Finder(run, candidates(run.spec), peak, judge)
    singles = finder.singles()
    fitting = [change for change in singles if change.fits]
    if budget is not None:
        fitting += finder.pairs()
    fitting.sort(key=lambda change: (RESULTS.index(change.result), len(change.levers)))
    return (*fitting, *(change for change in singles if not change.fits))


def _notes(report: Report, result: Result, held: int | None, unexplained: int, budget: int | None) -> list[str]:
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
    if budget is not None and reserved_bytes(result.ledger.peak_bytes + unexplained) <= budget:
        notes.append("by this estimate the run should have fitted: see the cause above, or check the configuration")
    if result.spec.parallelism.pipeline_parallel > 1:
        notes.append("the ledger is of the stage that needs most, which need not be the one that failed")
    return notes
