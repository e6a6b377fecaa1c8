"""The recomputation plan of a run with all its layers."""

from __future__ import annotations

from memcalc.layout.stages import Stage, recomputed_layers
from memcalc.spec.recompute_plan import Segment, items_of, leaves
from memcalc.spec.spec import Spec


def plan_of(spec: Spec, stage: Stage | None = None) -> Segment:
    """Return the recomputation plan with all layers of the model or a stage, for every notation of `recompute`."""
    layers, plan = spec.model.num_layers, spec.training.recompute
    part = Stage(0, 0, layers, has_embedding=True, has_head=True, in_flight=1) if stage is None else stage
    numbers = range(part.first, part.stop)
    if isinstance(plan, str):
        again = recomputed_layers(spec, part)
        return tuple((n,) if n in again else n for n in numbers)
    return tuple(item for item in items_of(plan, layers) if next(leaves(item)) in numbers)
