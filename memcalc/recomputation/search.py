"""Search for the cheapest plan with the verdict "fits": planned by allocated memory, judged by reserved memory.

Allocated memory of a plan is known at once, reserved memory only after an allocator replay. So an initial budget of
allocated bytes is assumed and the plan for it judged. The budget is corrected until no cheaper plan fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from memcalc.estimation.limits import limits_of
from memcalc.estimation.outside_allocator import least_outside_bytes, outside_bytes
from memcalc.ledger.verdict import Verdict, holding_memory
from memcalc.progress import Progress, silent
from memcalc.recomputation.config_chain import ConfigChain, with_recompute
from memcalc.recomputation.plan import Segment
from memcalc.recomputation.strategies.optimal import OptimalPlan
from memcalc.spec.hardware.gpus import GpuSpec
from memcalc.spec.spec import Spec
from memcalc.verdict.judge import judge
from memcalc.verdict.recorded_errors import reserve_ratio
from memcalc.verdict.run_types import kinds_of

TRIES = 8  # plans that are judged; each may take a replay
QUESTIONS = 24  # plans that are computed; most have been judged before
CLOSE = 0.002  # fraction of the memory: budgets of allocated bytes closer than this count as equal
MOST = 2**20  # sequences of a micro-batch
FORMULAS = 1.003  # formulas of allocated memory are off by less than this


class Proposal(NamedTuple):
    """A plan that is not judged yet."""

    configured: ConfigChain  # the chain that it was made for
    plan: OptimalPlan  # the plan
    # operators with results that recomputed layers save, as `training.recompute_keep`
    saved_operators: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Allocated bytes at its peak, from formulas."""
        return self.plan.evaluation.peak_bytes

    @property
    def recompute_flops(self) -> int:
        """FLOPs of recomputation."""
        return self.plan.evaluation.recompute_flops

    @property
    def spec(self) -> Spec:
        """The run with the plan."""
        recompute = self.configured.recompute(self.plan.plan.items)
        return with_recompute(self.configured.spec, recompute, self.saved_operators)


class JudgedPlan(NamedTuple):
    """A plan and its verdict."""

    proposal: Proposal  # the plan
    spec: Spec  # the run with it
    verdict: Verdict  # whether that fits
    budget: int  # budget of allocated bytes within which no cheaper plan that fits was found


class PlanJudge:
    """Verdicts on the plans of one run.

    Args:
        spec: the run.
        limit: bytes of a GPU that it may use.
        progress: called with the number of plans judged.
    """

    def __init__(self, spec: Spec, limit: int, progress: Progress = silent) -> None:
        self._progress = progress
        self.gpu: GpuSpec | None = spec.gpu
        self.limit = limit
        self.unmodelled_bytes = sum(each.at_least_bytes for each in holding_memory(limits_of(spec)))
        self.outside_bytes = outside_bytes(spec, self.gpu)
        self._least_outside_bytes = least_outside_bytes(spec, self.gpu)
        self._ratio = reserve_ratio(kinds_of(spec))[0]
        self._known: dict[tuple[int, Segment, tuple[str, ...]], JudgedPlan] = {}

    @property
    def reservable_bytes(self) -> int:
        """Bytes that the allocator may reserve."""
        return max(self.limit - self.outside_bytes - self.unmodelled_bytes, 0)

    @property
    def first_budget(self) -> int:
        """Initial budget of allocated bytes, from the reserved-to-allocated ratio of recorded runs; decides nothing."""
        return int(self.reservable_bytes / self._ratio)

    def judge(self, proposal: Proposal) -> JudgedPlan:
        """Return a plan with its verdict."""
        configured, found, saved_operators = proposal
        key = (configured.spec.training.micro_batch_size, found.plan.items, saved_operators)
        if key not in self._known:
            self._progress("plans", len(self._known))
            spec = proposal.spec
            self._known[key] = JudgedPlan(proposal, spec, judge(spec, self.limit), found.evaluation.peak_bytes)
        return self._known[key]

    def passes(self, verdict: Verdict) -> bool:
        """Return whether a run fits, ignoring parts that are not modelled."""
        if verdict.answer == "fits":
            return True
        modelled = verdict.interval is not None and self.needed(verdict) <= self.reservable_bytes
        return verdict.answer == "unknown" and bool(verdict.unmodelled) and modelled

    def scaled(self, allocated: int, verdict: Verdict) -> int:
        """Return the allocated bytes possible if the reserved-to-allocated ratio stays as under this verdict."""
        return allocated * self.reservable_bytes // max(self.needed(verdict), 1)

    def needed(self, verdict: Verdict) -> int:
        """Return the upper end of reserved memory; the lower bound if bounds decided."""
        if verdict.interval is None:
            return verdict.least_bytes - self.unmodelled_bytes - self._least_outside_bytes
        return verdict.interval.high_bytes - self.outside_bytes


class PlanSearch:
    """Search for the cheapest plan that fits.

    Args:
        ask: returns the cheapest plan within a budget of allocated bytes; None: there is none.
        judge: decides which plans fit.
        free: the plan without recomputation.
        floor: allocated bytes below which there is no plan.
        alternatives: plans to judge if they are cheaper than the best one found. Reserved memory does not always grow
            with allocated memory: plans that recompute layers separately cause less fragmentation.
    """

    def __init__(
        self,
        ask: Callable[[int], Proposal | None],
        judge: PlanJudge,
        free: Proposal,
        floor: int,
        alternatives: Sequence[Proposal],
    ) -> None:
        self._propose, self._judge, self._free = ask, judge, free
        self._alternatives = sorted(alternatives, key=lambda proposal: proposal.recompute_flops)
        self._floor = floor
        self._low, self._high = floor, max(int(judge.reservable_bytes * FORMULAS), floor + 1)
        self._tried: list[JudgedPlan] = []
        self._best: JudgedPlan | None = None

    def best_plan(self) -> JudgedPlan | None:
        """Return the cheapest plan found to fit; else the one most likely to fit; None: no plan fits."""
        if self._free.peak_bytes < self._high:
            if self._passes(self._free):
                return self._tried[0]
            self._high = self._free.peak_bytes
        budget = min(max(self._judge.first_budget, self._floor), self._high)
        for _ in range(QUESTIONS):
            proposal = self._propose(budget)
            if proposal is None or len(self._tried) >= TRIES:
                break
            following = self._after(budget, proposal)
            if following is None:
                break
            budget = following
        for proposal in self._alternatives:
            if not self._cheaper(proposal):
                break
            if self._passes(proposal):
                return self._tried[-1]
        return self._best or self._likeliest()

    def _after(self, budget: int, proposal: Proposal) -> int | None:
        """Return the next budget to try after a plan for this one; None: no better plan can be found."""
        best = self._best
        if best is not None and not self._cheaper(proposal):
            self._best, self._low = best._replace(budget=budget), budget
        elif self._passes(proposal):
            self._best, self._low = self._tried[-1]._replace(budget=budget), budget
            scaled = self._judge.scaled(proposal.peak_bytes, self._tried[-1].verdict)
            if best is None and self._low < scaled < self._high:
                return scaled
        elif best is None:
            self._high = budget
            scaled = self._judge.scaled(proposal.peak_bytes, self._tried[-1].verdict)
            return max(min(scaled, budget - 1), self._floor) if budget > self._floor else None
        else:
            self._high = budget
        close = self._high - self._low <= CLOSE * self._high
        return None if close else (self._low + self._high) // 2

    def _cheaper(self, proposal: Proposal) -> bool:
        """Return whether a plan recomputes less than the best one known to fit."""
        return self._best is None or proposal.recompute_flops < self._best.proposal.recompute_flops

    def _passes(self, proposal: Proposal) -> bool:
        self._tried.append(self._judge.judge(proposal))
        return self._judge.passes(self._tried[-1].verdict)

    def _likeliest(self) -> JudgedPlan | None:
        """Return the plan with the smallest need, of those that may fit."""
        unknown = [judged for judged in self._tried if judged.verdict.answer == "unknown"]
        return min(unknown, key=lambda judged: self._judge.needed(judged.verdict), default=None)
