"""The verb `recompute`: a configuration and a budget in, the plan and its price out."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import yaml

from memcalc.errors import DoesNotFit, InputError
from memcalc.estimation.outside import RESERVED_PER_THOUSAND, communication_library_bytes
from memcalc.ledger.result import Result
from memcalc.planning.chain import Chain
from memcalc.planning.configured import Configured, chain_of, with_recompute
from memcalc.planning.evaluation import Evaluation, evaluate, evaluate_all_kept
from memcalc.planning.frameworks import Said, in_all_words
from memcalc.planning.frameworks_selective import activation_bytes, in_selective_words
from memcalc.planning.gain import HOST_BYTES_PER_SECOND, Gain, Third, gain_of, offloaded
from memcalc.planning.plan import Plan
from memcalc.planning.strategies.every_k import best_k
from memcalc.planning.strategies.every_layer import every_layer
from memcalc.planning.strategies.none import keep_everything
from memcalc.planning.strategies.optimal import Found, front, optimal, undominated
from memcalc.planning.strategies.smallest import smallest
from memcalc.planning.strategies.square_root import square_root
from memcalc.planning.throughput import slow_down
from memcalc.rehearsal.rehearsal import estimate_rehearsed
from memcalc.spec.cards import Card, find_card
from memcalc.spec.spec import Spec
from memcalc.units import format_bytes

MOST_LAYERS = 144  # of one GPU: some 15 seconds, which grow with the square; the deepest preset has 126

SEARCHES = ("optimal", "selective")  # they look for the cheapest plan within the budget

STRATEGIES = {
    "none": keep_everything,
    "every-layer": every_layer,
    "sqrt": square_root,
    "every-k": best_k,
    "smallest": smallest,
}


class Planning(NamedTuple):
    """The answer.

    Args:
        configured: the configuration's chain.
        card: the card, where one is named.
        limit: bytes that a GPU may hold in all; None: nobody said.
        budget: bytes that may be allocated of these.
        found: the plan.
        before: everything kept.
        rules: what the rules of thumb need and cost.
        front: plans from the smallest to the fastest.
        recompute: the plan as `training.recompute` says it.
        keep: operators whose results recomputed layers keep, as `training.recompute_keep`: of a selective plan.
        result: the estimate of the run with the plan, rehearsed.
        said: the plan in the words of frameworks.
        gain: what it buys.
        third: offload to the host in its place; None: everything fits, or the card's rate is not known.
    """

    configured: Configured
    card: Card | None
    limit: int | None
    budget: int
    found: Found
    before: Evaluation
    rules: tuple[tuple[str, Evaluation], ...]
    front: tuple[Found, ...]
    recompute: list[Any] | str
    keep: tuple[str, ...]
    result: Result
    said: tuple[Said, ...]
    gain: Gain
    third: Third | None

    @property
    def peak_bytes(self) -> int:
        """What the plan needs at its peak, rehearsed."""
        return self.result.ledger.peak_bytes

    @property
    def rests_bytes(self) -> int:
        """What the rehearsal found beside the plan's evaluation, by which plans are compared: rests of blocks."""
        return self.peak_bytes - self.found.evaluation.peak_bytes


def plan_recompute(
    spec: Spec,
    limit: int | None = None,
    strategy: str = "optimal",
    *,
    maximize: bool = False,
    host_bytes_per_second: int = HOST_BYTES_PER_SECOND,
) -> Planning:
    """Which activations to keep.

    Args:
        spec: the run; what it says of recomputation is left aside.
        limit: bytes that a GPU may hold in all: reserved, context and communication library; None: the card's.
        strategy: "optimal", "selective", or a rule of `STRATEGIES`.
        maximize: whether to raise the micro-batch as far as a plan fits.
        host_bytes_per_second: of the link to the host, each way.

    Raises:
        InputError: no budget, an unknown strategy, or a run that is not planned for.
        DoesNotFit: no plan is small enough.
    """
    layers = -(-spec.model.num_layers // spec.parallelism.pipeline_parallel)
    if layers > MOST_LAYERS:
        raise InputError(
            f"num_layers = {spec.model.num_layers:,} makes {layers:,} layers for a GPU, and plans are found for up to "
            f"{MOST_LAYERS}.",
            "Raise pipeline_parallel, or plan a shallower model.",
            "model.num_layers",
        )
    if strategy not in (*SEARCHES, *STRATEGIES):
        known = ", ".join((*SEARCHES, *STRATEGIES))
        raise InputError(f"strategy = {strategy!r} is not known.", f"Known are {known}.", "--strategy")
    if spec.training.offload_activations != "none":
        raise InputError(
            f"offload_activations = {spec.training.offload_activations}; what is planned is what the device keeps.",
            "Set offload_activations: none; the answer says what offload in the plan's place would cost.",
            "training.offload_activations",
        )
    card = None if spec.hardware.gpu is None else find_card(spec.hardware.gpu)
    if limit is None and card is None:
        raise InputError("nothing says how much memory there is.", "Name a card with --gpu, or a size with --budget.")
    whole = limit if limit is not None else card.usable_bytes if card is not None else 0
    context = 0 if card is None else card.context_bytes
    budget = max(whole - context - communication_library_bytes(spec), 0) * 1000 // RESERVED_PER_THOUSAND
    largest, batches = _largest(spec, budget, strategy)
    if maximize:
        spec = largest
    configured = chain_of(spec)
    chain = configured.chain
    rules = tuple((name, evaluate(chain, rule(chain))) for name, rule in STRATEGIES.items())
    chosen: Configured = configured
    keep: tuple[str, ...] = ()
    if strategy == "selective":
        chosen, found, keep, result = _selective(configured, budget)
        whole_layers = optimal(chain, budget, bounded=False)
        rules = (*(() if whole_layers is None else (("optimal", whole_layers.evaluation),)), *rules)
    else:
        found, result = _found(configured, budget, strategy)
    recompute, before = configured.recompute(found.plan.items), evaluate_all_kept(chain)
    if keep:
        words = in_selective_words(configured, found, keep, budget, activation_bytes(result))
    else:
        words = in_all_words(configured, found.plan.items, budget)
    return Planning(
        chosen,
        card,
        limit if limit is not None else whole,
        budget,
        found,
        before,
        rules,
        tuple(undominated([*front(chain), *(() if keep else (found,))])),
        recompute,
        keep,
        result,
        tuple(words),
        gain_of(batches, _slow_down(largest, budget, strategy) if batches[0] < batches[1] else 1.0),
        offloaded(configured, before, budget, card, host_bytes_per_second),
    )


def _selective(configured: Configured, budget: int) -> tuple[Configured, Found, tuple[str, ...], Result]:
    from memcalc.planning.selective import plan_selective

    found = plan_selective(configured.spec, budget)
    if found is None:
        raise _too_small(configured, budget, "selective")
    return found


def _found(configured: Configured, budget: int, strategy: str) -> tuple[Found, Result]:
    """The plan and its rehearsal; where that needs more than the chain says, once more with that much less."""
    chain, room = configured.chain, budget
    for _ in range(4):
        found = _asked(chain, room, strategy)
        if found is None or found.evaluation.peak_bytes > room:
            break
        planned = with_recompute(configured.spec, configured.recompute(found.plan.items))
        result = estimate_rehearsed(planned)
        excess = result.ledger.peak_bytes - budget
        if excess <= 0:
            return found, result
        room -= excess
    raise _too_small(configured, budget, strategy)


def _asked(chain: Chain, budget: int, strategy: str) -> Found | None:
    if strategy == "optimal":
        return optimal(chain, budget)
    plan: Plan = STRATEGIES[strategy](chain)
    return Found(plan, evaluate(chain, plan), None)


def _too_small(configured: Configured, budget: int, strategy: str) -> DoesNotFit:
    """What the smallest plan needs, and what holds it."""
    chain = configured.chain
    plan = _least(chain, strategy)
    result = estimate_rehearsed(with_recompute(configured.spec, configured.recompute(plan.items)))
    ledger = result.ledger
    held = sorted(ledger.components(ledger.peak_phase).items(), key=lambda row: -row[1])[:3]
    holders = ", ".join(f"{component.value.replace('_', ' ')} {format_bytes(amount)}" for component, amount in held)
    asked = "No plan" if strategy in SEARCHES else f"Strategy {strategy} does not fit: no plan of it"
    return DoesNotFit(
        f"{asked} fits {format_bytes(budget)} of allocated memory. The smallest needs "
        f"{format_bytes(ledger.peak_bytes)}, in {ledger.peak_phase}: {holders}. "
        "Lower micro_batch_size or sequence_length, shard the model's states, or take a larger card."
    )


def _least(chain: Chain, strategy: str) -> Plan:
    """The plan of a strategy with the lowest peak."""
    return {"optimal": smallest, "selective": every_layer, **STRATEGIES}[strategy](chain)


def _largest(spec: Spec, budget: int, strategy: str) -> tuple[Spec, tuple[int, int]]:
    """The largest micro-batch that some plan of the strategy fits, and the largest without recomputation."""

    @cache
    def chain(batch: int) -> Chain:
        return chain_of(_with_batch(spec, batch)).chain

    def fits(batch: int, *, keeps: bool) -> bool:
        plan = keep_everything(chain(batch)) if keeps else _least(chain(batch), strategy)
        return evaluate(chain(batch), plan).peak_bytes <= budget

    without, best = (_most(lambda batch, keeps=keeps: fits(batch, keeps=keeps)) for keeps in (True, False))
    if not best:
        raise _too_small(chain_of(_with_batch(spec, 1)), budget, strategy)
    return _with_batch(spec, best), (without, best)


def _slow_down(spec: Spec, budget: int, strategy: str) -> float:
    """Of a step of the largest micro-batch, by the plan that fits it."""
    configured = chain_of(spec)
    if strategy in SEARCHES:
        found = optimal(configured.chain, budget, bounded=False)
    else:
        found = _asked(configured.chain, budget, strategy)
    evaluation = evaluate(configured.chain, _least(configured.chain, strategy)) if found is None else found.evaluation
    return slow_down(configured.chain.flops, evaluation.again_flops)


def _with_batch(spec: Spec, batch: int) -> Spec:
    from memcalc.importers.loading import load

    return load(spec.model_dump(), (f"training.micro_batch_size={batch}",), gpu=None).with_notes(spec.notes)


def _most(fits: Any) -> int:
    """The largest number of 1, 2, ... that fits, fitting being a matter of size; 0: none."""
    high = 1
    while fits(high) and high < 2**20:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def planned_yaml(planning: Planning) -> str:
    """The whole configuration with the plan in it."""
    content = planning.result.spec.model_dump(mode="json", exclude_none=True)
    content["training"]["recompute"] = planning.recompute
    if not planning.keep:
        del content["training"]["recompute_keep"]
    return yaml.safe_dump(content, sort_keys=False)
