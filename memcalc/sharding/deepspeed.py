"""The DeepSpeed ZeRO engine of a rank, and the runs for which it is modelled (DeepSpeed 0.19)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from memcalc.architectures.structure import block_structure
from memcalc.layout.local_parameters import LocalParameter
from memcalc.sharding.engine import Engine
from memcalc.sharding.zero3 import ZeRO3
from memcalc.sharding.zero3_order import Order
from memcalc.sharding.zero12 import ZeRO12
from memcalc.spec.recompute_plan import Segment
from memcalc.spec.spec import Spec
from memcalc.states.state_options import state_options
from memcalc.stream.requests import Requests

# Optimizers with updates of a flat tensor that were compared with runs of DeepSpeed.
COMPARED = ("sgd", "momentum", "adam", "adamw", "lion", "rmsprop", "adamax", "nadam", "radam", "adadelta")
RECIPE, DTYPE = "mixed-16", "bf16"  # the effect of "bf16": {"enabled": true}


def deepspeed_engine(
    requests: Requests,
    ordered: Sequence[LocalParameter],
    units: Mapping[int, Sequence[LocalParameter]],
    spec: Spec,
    plan: Segment,
    rank: int | None = None,
) -> Engine:
    """Return the engine of a run for which `lacks` yields nothing.

    Args:
        requests: where they are recorded.
        ordered: all parameters, in registration order.
        units: the same by unit.
        spec: the run.
        plan: its recomputation plan.
        rank: the rank; None: the one that holds most.
    """
    options = state_options(spec)
    if options.zero_stage < 3:
        return ZeRO12(requests, ordered, options, rank)
    stops_inside = not block_structure(spec).residual_dropout
    tied, detached = spec.model.tie_word_embeddings, options.detached
    order = Order(ordered, units, tied=tied, stops_inside=stops_inside, detached=detached)
    return ZeRO3(requests, ordered, [*order.turns(plan)], options)


def lacks(spec: Spec, plan: Segment) -> Iterator[str]:
    """Yield the properties of a multi-rank DeepSpeed run for which the order of requests is not modelled."""
    training, parallelism, options = spec.training, spec.parallelism, state_options(spec)
    whole = options.zero_stage == 3
    nested = any(not isinstance(part, int) for item in plan if not isinstance(item, int) for part in item)
    reasons = {
        "DeepSpeed without ZeRO": parallelism.zero_stage == 0,
        "DeepSpeed with tensor or pipeline parallelism": parallelism.ranks != parallelism.data_parallel,
        "hierarchical sharding": parallelism.shards != parallelism.data_parallel,
        f"DeepSpeed and recipe {training.recipe} in {training.dtype}": (training.recipe, training.dtype)
        != (RECIPE, DTYPE),
        f"DeepSpeed and optimizer {training.optimizer}": training.optimizer not in COMPARED,
        "DeepSpeed and an average of the weights": training.ema != "none",
        "DeepSpeed and FP8": training.fp8 != "none",
        f"DeepSpeed and a loss that is {training.loss}": training.loss != "materialized",
        "DeepSpeed and adapters": training.lora is not None,
        "ZeRO stage 3 and modules that are not the reference decoder's": whole and training.implementation != "plain",
        "ZeRO stage 3 and nested recomputation": whole and nested,
    }
    yield from (reason for reason, is_so in reasons.items() if is_so)
