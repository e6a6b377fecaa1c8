"""The command `recompute`: from a run and the memory of its GPU to a plan and its cost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import yaml

from memcalc.errors import InputError
from memcalc.jupyter import NotebookDisplay
from memcalc.ledger.result import Result
from memcalc.ledger.verdict import Verdict
from memcalc.progress import Progress, silent
from memcalc.recomputation.batch_gain import HOST_BYTES_PER_SECOND, Gain, OffloadAlternative, offloaded
from memcalc.recomputation.config_chain import ConfigChain
from memcalc.recomputation.evaluation import Evaluation, evaluate, evaluate_without_recomputation
from memcalc.recomputation.framework_plans import FrameworkText, plan_texts
from memcalc.recomputation.framework_plans_selective import activation_bytes, selective_plan_texts
from memcalc.recomputation.planner import SEARCHES, STRATEGIES, Planner
from memcalc.recomputation.strategies.optimal import OptimalPlan, front, optimal, undominated
from memcalc.spec.hardware.gpus import GpuSpec
from memcalc.suggestions.run_overrides import UserRun
from memcalc.text import harmless
from memcalc.units import format_bytes
from memcalc.verdict.judge import size

MOST_LAYERS = 144  # per GPU: about 15 seconds, growing quadratically; the deepest preset has 126


@dataclass(frozen=True, slots=True)
class RecomputeResult(NotebookDisplay):
    """The result of `recompute`.

    Args:
        configured: the chain of the run.
        gpu: the GPU, if given.
        limit: bytes of a GPU that the run may use in total.
        budget: allocated bytes that were found to fit within `limit`; no cheaper plan that fits was found within them.
        plan: the plan.
        before: memory and cost without recomputation.
        rules: memory and cost of the rules of thumb.
        front: plans from the smallest to the fastest.
        recompute: the plan in the syntax of `training.recompute`.
        saved_operators: for a selective plan, operators with results that recomputed layers save, as
            `training.recompute_keep`.
        result: the estimate of the run with the plan, replayed if possible.
        verdict: of the run with the plan, on a GPU that has `limit` bytes.
        framework_texts: the plan as text for frameworks.
        gain: from recomputation.
        third: offload to the host instead; None: everything fits, or the speed of the GPU is unknown.
    """

    configured: ConfigChain
    gpu: GpuSpec | None
    limit: int
    budget: int
    plan: OptimalPlan
    before: Evaluation
    rules: tuple[tuple[str, Evaluation], ...]
    front: tuple[OptimalPlan, ...]
    recompute: list[Any] | str
    saved_operators: tuple[str, ...]
    result: Result
    verdict: Verdict
    framework_texts: tuple[FrameworkText, ...]
    gain: Gain
    third: OffloadAlternative | None

    def __repr__(self) -> str:
        """Return the plan, its peak and its cost in one line."""
        share = self.plan.evaluation.recompute_flops / self.configured.chain.flops
        peak = format_bytes(self.peak_bytes, "GiB")
        plan = f"{self.plan.plan.strategy}, peak {peak}, recomputes {share:.1%} of a forward"
        return f"<Planning {harmless(self.configured.spec.name)}: {self.verdict.answer}; {plan}>"

    @property
    def peak_bytes(self) -> int:
        """Allocated bytes at the peak of the plan, after the allocator replay."""
        return self.result.ledger.peak_bytes

    @property
    def remainder_bytes(self) -> int:
        """Replayed minus estimated peak, in bytes: unsplit block remainders. Plans are compared by the estimate."""
        return self.peak_bytes - self.plan.evaluation.peak_bytes


def plan_recompute(
    run: UserRun,
    limit: int | None = None,
    strategy: str = "optimal",
    *,
    maximize: bool = False,
    host_bytes_per_second: int = HOST_BYTES_PER_SECOND,
    progress: Progress = silent,
) -> RecomputeResult:
    """Plan which activations to save.

    Args:
        run: the run; its own plan is ignored.
        limit: bytes of a GPU that it may use, including reserved memory, context and communication library. None, or
            more than the GPU has: the GPU's usable memory.
        strategy: "optimal", "selective", or a rule of `STRATEGIES`.
        maximize: whether to increase the micro-batch as long as a plan fits.
        host_bytes_per_second: of the link to the host, each way.
        progress: called with the number of plans made.

    Raises:
        InputError: no budget, an unknown strategy, or a run that cannot be planned.
        DoesNotFit: no plan is small enough.
    """
    spec = run.spec
    layers = -(-spec.model.num_layers // spec.parallelism.pipeline_parallel)
    if layers > MOST_LAYERS:
        raise InputError(
            f"num_layers = {spec.model.num_layers:,} makes {layers:,} layers for a GPU, and the limit is "
            f"{MOST_LAYERS}.",
            "Raise pipeline_parallel, or plan a shallower model.",
            "model.num_layers",
        )
    if strategy not in (*SEARCHES, *STRATEGIES):
        known = ", ".join((*SEARCHES, *STRATEGIES))
        raise InputError(f"strategy = {strategy!r} is not known.", f"Choose {known}.", "--strategy")
    if spec.training.offload_activations != "none":
        raise InputError(
            f"offload_activations = {spec.training.offload_activations} leaves no activations to plan on the device.",
            "Set offload_activations: none; the result states the cost of offload instead.",
            "training.offload_activations",
        )
    gpu = spec.gpu
    if limit is None and gpu is None:
        raise InputError("the memory limit is missing.", "Add --gpu GPU or --budget SIZE.")
    capacities = (limit, None if gpu is None else gpu.usable_bytes)
    planner = Planner(run, min(amount for amount in capacities if amount is not None), strategy, progress)
    batches = planner.largest() if maximize else None
    batch = spec.training.micro_batch_size if batches is None else batches[1]
    judged = planner.plan(batch) if batch else None
    if judged is None:
        raise planner.too_small(max(batch, 1))
    configured = planner.configured(batch)
    chain = configured.chain
    chosen, found, saved_operators = judged.proposal
    if strategy == "optimal":  # the bound is computed for the final plan only
        bounded = optimal(chain, judged.budget)
        if bounded is not None and bounded.bound is not None:
            found = found._replace(bound=min(bounded.bound, found.evaluation.recompute_flops))
    rules = tuple((name, evaluate(chain, rule(chain))) for name, rule in STRATEGIES.items())
    if strategy == "selective":
        whole_layers = optimal(chain, judged.budget, bounded=False)
        rules = (*(() if whole_layers is None else (("optimal", whole_layers.evaluation),)), *rules)
    recompute, before = chosen.recompute(found.plan.items), evaluate_without_recomputation(chain)
    result = replace(size(judged.spec), judgement=judged.verdict)
    if saved_operators:
        words = selective_plan_texts(chosen, found, saved_operators, judged.budget, activation_bytes(result))
    else:
        words = plan_texts(chosen, found.plan.items, judged.budget)
    return RecomputeResult(
        chosen,
        gpu,
        planner.limit,
        judged.budget,
        found,
        before,
        rules,
        tuple(undominated([*front(chain), *(() if saved_operators else (found,))])),
        recompute,
        saved_operators,
        result,
        judged.verdict,
        tuple(words),
        planner.gain(judged, batches),
        offloaded(configured, before, judged.budget, gpu, host_bytes_per_second),
    )


def planned_yaml(planning: RecomputeResult) -> str:
    """Return the whole configuration with the plan in it, as YAML."""
    content = planning.result.spec.model_dump(mode="json", exclude_none=True)
    content["training"]["recompute"] = planning.recompute
    if not planning.saved_operators:
        del content["training"]["recompute_keep"]
    return yaml.safe_dump(content, sort_keys=False)
