"""Communication buffers of each engine: buckets, gathered parameters, prefetch, reduce-scatter inputs."""

from __future__ import annotations

from functools import lru_cache

from memcalc.estimation.choice import Choice, choice_of
from memcalc.estimation.engines import megatron, pipelining
from memcalc.estimation.engines.buffers import Around, Buffers
from memcalc.estimation.engines.ddp import ddp
from memcalc.estimation.engines.deepspeed import deepspeed
from memcalc.estimation.engines.fsdp2 import fsdp2
from memcalc.estimation.sharding import Parameters, stage_parameters, without_properties
from memcalc.estimation.stages import Stage
from memcalc.spec.spec import Spec


def communication_buffers(spec: Spec, stage: Stage) -> Buffers:
    """Return the buffers of the run's engine on one pipeline stage."""
    if spec.parallelism.engine == "megatron":  # main gradients are one contiguous buffer, reduced in place
        if stage.has_head or spec.training.implementation != "megatron":
            return Buffers()
        received = (megatron.received_gradient(spec),)
        return Buffers((), Around(backward_layer=received, backward_first_layer=received, backward_embedding=received))
    of_stages = tuple(pipelining.received(spec, stage)) if pipelining.uses_pipelining(spec) else ()
    if spec.parallelism.shards * spec.parallelism.data_parallel_replicate == 1:
        return Buffers(of_stages)
    found = _buffers(without_properties(stage_parameters(spec, stage)), choice_of(spec))
    return found._replace(steady=(*of_stages, *found.steady))


@lru_cache(maxsize=1024)
def _buffers(parameters: Parameters, choice: Choice) -> Buffers:
    if choice.engine == "fsdp2":
        return fsdp2(parameters, choice)
    if choice.engine == "deepspeed" and choice.zero_stage >= 1:
        return deepspeed(parameters, choice)
    return ddp(parameters, choice)
