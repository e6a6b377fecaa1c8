"""Communication buffers of each engine: buckets, gathered parameters, prefetch, reduce-scatter inputs."""

from __future__ import annotations

from functools import lru_cache

from memcalc.layout.local_parameters import LocalParameters, stage_parameters, without_companions
from memcalc.layout.stages import Stage
from memcalc.phase_peaks.ddp_buffers import ddp
from memcalc.phase_peaks.deepspeed_buffers import deepspeed
from memcalc.phase_peaks.fsdp2_buffers import fsdp2
from memcalc.phase_peaks.layer_buffers import EngineBuffers, PerLayerBuffers
from memcalc.spec.spec import Spec
from memcalc.states import megatron_buffers, pipelining
from memcalc.states.state_options import StateOptions, state_options


def communication_buffers(spec: Spec, stage: Stage) -> EngineBuffers:
    """Return the buffers of the run's engine on one pipeline stage."""
    if spec.parallelism.engine == "megatron":  # main gradients are one contiguous buffer, reduced in place
        if stage.has_head or spec.training.implementation != "megatron":
            return EngineBuffers()
        received = (megatron_buffers.received_gradient(spec),)
        return EngineBuffers(
            (), PerLayerBuffers(backward_layer=received, backward_first_layer=received, backward_embedding=received)
        )
    of_stages = tuple(pipelining.received(spec, stage)) if pipelining.uses_pipelining(spec) else ()
    if spec.parallelism.shards * spec.parallelism.data_parallel_replicate == 1:
        return EngineBuffers(of_stages)
    found = _buffers(without_companions(stage_parameters(spec, stage)), state_options(spec))
    return found._replace(steady=(*of_stages, *found.steady))


@lru_cache(maxsize=1024)
def _buffers(parameters: LocalParameters, options: StateOptions) -> EngineBuffers:
    if options.engine == "fsdp2":
        return fsdp2(parameters, options)
    if options.engine == "deepspeed" and options.zero_stage >= 1:
        return deepspeed(parameters, options)
    return ddp(parameters, options)
