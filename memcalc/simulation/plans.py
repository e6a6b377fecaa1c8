"""The recomputation plan of a run with all its layers."""

from __future__ import annotations

from memcalc.layout.stages import Stage, recomputed_layers
from memcalc.spec.recompute_plan import Segment, items_of, leaves
from memcalc.spec.spec import Spec


def plan_of(spec: Spec, stage: Stage | None = None) -> Segment:
    """Return the recomputation plan with all layers of the model or a stage, for every notation of `recompute`."""
    training, layers = spec.training, spec.model.num_layers
    first, stop = (0, layers) if stage is None else (stage.first, stage.stop)
    plan = training.recompute
    if isinstance(plan, str):
        again = recomputed_layers(training, first, stop)
        return tuple((n,) if n in again else n for n in range(first, stop))
    return tuple(item for item in items_of(plan, layers) if first <= next(leaves(item)) < stop)
