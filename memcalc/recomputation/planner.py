"""Plans of one run by one strategy: the plan of a micro-batch, the largest micro-batch, and why nothing fits."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from memcalc.errors import DoesNotFit
from memcalc.estimation.estimate import estimate
from memcalc.ledger.verdict import Verdict
from memcalc.progress import Progress, silent
from memcalc.recomputation.batch_gain import Gain, gain_of, slow_down
from memcalc.recomputation.chain import Chain
from memcalc.recomputation.config_chain import ConfigChain, chain_of
from memcalc.recomputation.evaluation import evaluate
from memcalc.recomputation.plan import Plan, depth
from memcalc.recomputation.search import MOST, JudgedPlan, PlanJudge, PlanSearch, Proposal
from memcalc.recomputation.strategies.lowest_peak import smallest
from memcalc.recomputation.strategies.optimal import OptimalPlan, optimal
from memcalc.recomputation.strategies.rules import best_k, every_layer, save_everything, square_root
from memcalc.spec.recompute_plan import DEEPEST
from memcalc.spec.spec import Spec
from memcalc.suggestions.run_overrides import UserRun, written_out
from memcalc.units import format_bytes, format_host_memory, largest_that_fits
from memcalc.verdict.reasons import remedy_of

SEARCHES = ("optimal", "selective")  # they search for the cheapest plan that fits

STRATEGIES: dict[str, Callable[[Chain], Plan]] = {
    "none": save_everything,
    "every-layer": every_layer,
    "sqrt": square_root,
    "every-k": best_k,
    "smallest": smallest,
}

_LEAST: dict[str, Callable[[Chain], Plan]] = {"optimal": smallest, "selective": every_layer, **STRATEGIES}


class Planner:
    """Planner for one run and one strategy, for any micro-batch.

    Args:
        run: the run.
        limit: bytes of a GPU that it may use.
        strategy: of `SEARCHES` or `STRATEGIES`.
        progress: called with the number of plans judged.
    """

    def __init__(self, run: UserRun, limit: int, strategy: str, progress: Progress = silent) -> None:
        self.run, self.spec, self.limit, self.strategy = run, run.spec, limit, strategy
        self.judge = PlanJudge(run.spec, limit, progress)
        self.configured = cache(self._configured)
        self.plan = cache(self._plan)

    def _configured(self, batch: int) -> ConfigChain:
        """Return the chain of the run with another micro-batch."""
        same = batch == self.spec.training.micro_batch_size
        return chain_of(self.spec if same else self.run.changed((f"training.micro_batch_size={batch}",)))

    def _plan(self, batch: int) -> JudgedPlan | None:
        """Return the cheapest plan of a micro-batch that fits, else one that may fit; None: none does."""
        configured = self.configured(batch)
        chain, least = configured.chain, self.least(configured)
        free = _proposal(configured, save_everything)
        if self.strategy == "selective":
            from memcalc.recomputation.selective import Selective

            return PlanSearch(
                Selective(configured.spec).cheapest_plan, self.judge, free, least.peak_bytes, [least]
            ).best_plan()
        if self.strategy == "optimal":

            def ask(budget: int) -> Proposal | None:
                found = optimal(chain, budget, bounded=False)
                if found is None or depth(found.plan.items) < DEEPEST:
                    return None if found is None else Proposal(configured, found)
                return least

            others = [least, _proposal(configured, every_layer), _proposal(configured, square_root)]
            return PlanSearch(ask, self.judge, free, least.peak_bytes, others).best_plan()
        judged = self.judge.judge(least)
        if judged.verdict.answer == "does-not-fit":
            return None
        return judged._replace(budget=max(self.judge.scaled(judged.budget, judged.verdict), judged.budget))

    def least(self, configured: ConfigChain) -> Proposal:
        """Return the strategy's plan with the lowest peak that a configuration can express."""
        found = _proposal(configured, _LEAST[self.strategy])
        return found if depth(found.plan.plan.items) < DEEPEST else _proposal(configured, every_layer)

    def largest(self) -> tuple[int, int]:
        """Return the largest micro-batch without recomputation, and with a plan: each fits, and one more does not.

        The search starts from estimates of allocated memory; the results have verdicts like any run.
        """
        without, most = self._estimated(self.judge.first_budget)
        without = largest_that_fits(self._kept_fits, MOST, without)
        return without, largest_that_fits(self._planned_fits, MOST, most)

    def _estimated(self, budget: int) -> tuple[int, int]:
        """Return the micro-batches of `largest`, estimated from allocated memory alone, with `budget` bytes."""

        def kept_fits(batch: int) -> bool:
            return _proposal(self.configured(batch), save_everything).peak_bytes <= budget

        def planned_fits(batch: int) -> bool:
            return self.least(self.configured(batch)).peak_bytes <= budget

        return largest_that_fits(kept_fits, MOST - 1), largest_that_fits(planned_fits, MOST - 1)

    def _kept_fits(self, batch: int) -> bool:
        """Return whether a micro-batch fits without recomputation."""
        return self.judge.passes(self.judge.judge(_proposal(self.configured(batch), save_everything)).verdict)

    def _planned_fits(self, batch: int) -> bool:
        """Return whether a micro-batch fits with some plan: the smallest, or one that the search finds."""
        if self.judge.passes(self.judge.judge(self.least(self.configured(batch))).verdict):
            return True
        found = self.plan(batch)
        return found is not None and self.judge.passes(found.verdict)

    def gain(self, judged: JudgedPlan, batches: tuple[int, int] | None) -> Gain:
        """Return the gain from recomputation.

        Args:
            judged: the plan.
            batches: from `largest`; None: estimated, with as much allocated memory as this plan's search allowed.
        """
        chain, again = judged.proposal.configured.chain, judged.proposal.recompute_flops
        if batches is not None:
            return gain_of(batches, slow_down(chain.flops, again) if batches[0] < batches[1] else 1.0, replayed=True)
        batch, without, most = self.spec.training.micro_batch_size, *self._estimated(judged.budget)
        if self.judge.passes(judged.verdict):  # the verdict of this micro-batch is known
            most = max(most, batch)
            without = min(without, batch - 1) if again else max(without, batch)
        if most != batch:
            chain, again = self.configured(most).chain, self._cheapest(most, judged.budget).recompute_flops
        return gain_of((without, most), slow_down(chain.flops, again) if without < most else 1.0, replayed=False)

    def _cheapest(self, batch: int, budget: int) -> Proposal:
        """Return the cheapest plan of a micro-batch by allocated memory alone."""
        configured = self.configured(batch)
        found = optimal(configured.chain, budget, bounded=False) if self.strategy in SEARCHES else None
        return self.least(configured) if found is None else Proposal(configured, found)

    def too_small(self, batch: int) -> DoesNotFit:
        """Return the error if no plan fits: the need of the smallest plan, its components, and a remedy."""
        judged = self.judge.judge(self.least(self.configured(batch)))
        ledger = estimate(judged.spec).ledger
        held = sorted(ledger.components(ledger.peak_phase).items(), key=lambda row: -row[1])[:3]
        holders = ", ".join(f"{component.value.replace('_', ' ')} {format_bytes(amount)}" for component, amount in held)
        needed = _needed(judged.verdict, ledger.peak_bytes + self.judge.outside_bytes)
        searched = self.strategy in SEARCHES
        asked = "No plan fits" if searched else f"Strategy {self.strategy} does not fit"
        return DoesNotFit(
            f"{asked} {self._available()}. {'The smallest' if searched else 'It'} needs {needed}; its "
            f"allocated peak, {format_bytes(ledger.peak_bytes)}, is in {ledger.peak_phase}: {holders}. "
            f"{self._help(judged.spec, ledger.peak_phase)}"
        )

    def _available(self) -> str:
        gpu = self.judge.gpu
        if gpu is None or self.limit < gpu.usable_bytes:
            return f"the {format_bytes(self.limit)} budget"
        return f"{format_bytes(self.limit)} usable on {gpu.label}"

    def _help(self, planned: Spec, phase: str) -> str:
        """Return advice for a run that no plan makes fit, as text."""
        stated = "Recomputation does not reduce the optimizer step. " if phase.startswith("optimizer") else ""
        remedy = remedy_of(written_out(planned), self.limit)
        if remedy is None:
            return (
                f"{stated}No single change that keeps the training result is enough: shard the model over more GPUs "
                "(`memcalc fit` finds how), or use a larger GPU."
            )
        words = " ".join(f"--set {override.partition('.')[2]}" for override in remedy.overrides)
        host = ""
        if remedy.host_bytes:
            host = f", and {format_host_memory(remedy.host_bytes, remedy.node_host_bytes)}"
        needed = f"{format_bytes(remedy.device_bytes)}{host}; cost: {remedy.cost}"
        return f"{stated}Cheapest change with which a plan fits: {words} ({needed})."


def _needed(verdict: Verdict, least: int) -> str:
    """Return known device memory as text: a range after a replay, else allocated plus outside memory."""
    interval = verdict.interval
    if interval is None:
        return f"at least {format_bytes(max(verdict.least_bytes, least))}"
    return f"{format_bytes(interval.low_bytes)} to {format_bytes(interval.high_bytes)}"


def _proposal(configured: ConfigChain, strategy: Callable[[Chain], Plan]) -> Proposal:
    plan = strategy(configured.chain)
    return Proposal(configured, OptimalPlan(plan, evaluate(configured.chain, plan), None))
