"""The sharding engine of a run, its replayed ranks, and its handling of gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memcalc.architectures.catalogue import GradientPolicy
from memcalc.layout.local_parameters import LocalParameter
from memcalc.layout.schedules import uses_pipelining
from memcalc.layout.sequence_sharding import has_ring_attention
from memcalc.sharding.ddp import DDP
from memcalc.sharding.deepspeed import deepspeed_engine
from memcalc.sharding.engine import ROOT, Engine
from memcalc.sharding.expert_fsdp2 import ExpertFSDP2
from memcalc.sharding.fsdp1 import FSDP1
from memcalc.sharding.fsdp2 import FSDP2
from memcalc.sharding.megatron import MegatronBuffers, MegatronDDP
from memcalc.sharding.pipelined_fsdp2 import PipelinedFSDP2
from memcalc.spec.recompute_plan import Segment
from memcalc.spec.spec import Spec
from memcalc.states.gradient_policy import gradient_policy
from memcalc.states.megatron_buffers import rotary_table, score_buffer
from memcalc.states.state_options import StateOptions, state_options
from memcalc.stream.requests import Requests

SAMPLED_RANKS = 8  # GPUs of a node: up to this number, every rank is replayed


def engine_of(
    requests: Requests,
    ordered: Sequence[LocalParameter],
    units: Mapping[int, Sequence[LocalParameter]],
    spec: Spec,
    plan: Segment,
    rank: int | None = None,
    chunk: int = 0,
) -> Engine:
    """Return the sharding engine of a run.

    Args:
        requests: the list of requests to record to.
        ordered: all parameters, in registration order.
        units: the same by unit.
        spec: the run.
        plan: the recomputation plan.
        rank: the data-parallel rank; None: the one with the most memory.
        chunk: of several chunks on a pipeline stage, the number of the one with these parameters.
    """
    options = state_options(spec)
    if options.engine == "megatron":
        return MegatronDDP(requests, ordered, options, _megatron_buffers(spec), rank or 0)
    if options.engine == "deepspeed":
        return deepspeed_engine(requests, ordered, units, spec, plan, rank)
    if options.data_parallel == 1:
        return Engine(requests)
    if options.engine == "fsdp2" and uses_pipelining(spec):
        return PipelinedFSDP2(requests, units, options, chunk)
    if options.engine == "fsdp2" and options.fsdp.expert_units:
        return ExpertFSDP2(requests, units, options)
    if options.engine == "fsdp2":
        return FSDP2(requests, units, options)
    if options.engine == "fsdp1":
        return FSDP1(requests, units, options, rank or 0)
    # Frameworks accumulate gradients under no_sync; memcalc's own step does not (step/loop.py).
    framework = spec.training.framework
    return DDP(
        requests,
        ordered,
        options,
        reduces_each=framework is None,
        stream=int(framework == "lightning"),
        finds_unused=spec.parallelism.find_unused_parameters,
        bucket_cap_mb=spec.parallelism.bucket_cap_mb,
    )


def reference_engine_of(
    requests: Requests,
    ordered: Sequence[LocalParameter],
    units: Mapping[int, Sequence[LocalParameter]],
    spec: Spec,
    plan: Segment,
    policy: Engine | None = None,
) -> Engine:
    """Return the engine of a model that scores micro-batches, outside autograd: perhaps that of the policy itself.

    A second model has weights alone. Where the policy's are sharded its own engine gathers them, apart from the
    policy's; otherwise they are whole on each rank. TRL 1.16 models/utils.py, prepare_deepspeed: stage 3, or stage 0
    instead of 1 and 2.

    Args:
        requests: as for `engine_of`.
        ordered: the same.
        units: the same.
        spec: the same.
        plan: the same.
        policy: the engine of the policy, if the model scores its micro-batches.
    """
    if policy is not None and policy.scores_itself:
        return policy
    if not state_options(spec).shards_weights:
        return Engine(requests)
    engine = engine_of(requests, ordered, units, spec, plan)
    if spec.training.reference_model or spec.training.lora is None:  # otherwise the policy without its adapters
        engine.omit_backward()
    return engine


def ranks_that_may_hold_most(spec: Spec) -> tuple[int | None, ...]:
    """Return the data-parallel ranks of which one has the highest peak of a pass (None: the one `engine_of` takes).

    With states in host memory at DeepSpeed's stage 2 the last rank's gradients are copied first, while most activations
    are live, and the first rank has the embedding, often the largest parameter.
    """
    options = state_options(spec)
    copies = options.engine == "deepspeed" and options.host.offloads and options.zero_stage == 2
    return (None, 0) if copies else (None,)


def _megatron_buffers(spec: Spec) -> MegatronBuffers:
    """Return the sizes of the buffers of Megatron-Core's modules."""
    gpu = spec.gpu
    return MegatronBuffers(
        scores=score_buffer(spec).each,
        angles=rotary_table(spec).each if spec.model.position_embedding == "rope" else 0,
        l2_cache=(gpu.l2_bytes if gpu is not None else None) or 0,
    )


def ranks_to_replay(spec: Spec) -> tuple[int | None, ...]:
    """Return the ranks that are replayed for a verdict, first the one with the most memory (None).

    All data-parallel ranks have the same requests, except in three cases. Of these, SAMPLED_RANKS evenly spaced ranks
    and the last one are replayed:

    - DeepSpeed's stage 2 allocates all gradients of a rank when the first of them is reduced. The last rank allocates
      most, but others may reserve up to 17 % more, because their gradients are allocated later, when free blocks are
      smaller.
    - At stage 1 each rank flattens the gradients of other parameters. Of one stage of Llama 3 8B in four, one rank of
      eight reserves 18 % more than the first. BF16_Optimizer flattens all gradients on each rank.
    - Megatron-Core's distributed optimizer updates other parts of parameters on each rank.

    Of the ranks that share a sequence by ring attention, the last one allocates less than the one before, but may
    reserve more.
    """
    if has_ring_attention(spec):
        return None, spec.parallelism.context_parallel - 1
    options = state_options(spec)
    ranks, stage = options.data_parallel, options.zero_stage
    deepspeed = options.engine == "deepspeed" and (stage == 2 or (stage == 1 and not options.sums_apart))
    if ranks == 1 or not (deepspeed or (options.engine == "megatron" and stage)):
        return (None,)
    sampled = {place * ranks // SAMPLED_RANKS for place in range(SAMPLED_RANKS)} | {ranks - 1}
    if options.engine == "deepspeed" and stage == 2:
        sampled.remove(ranks - 1)  # it is the one with the most memory
    elif not options.step.pipelined:  # in DeepSpeed's pipelines it depends on the size of the first parameter
        sampled.remove(0)
    return (None, *sorted(sampled))


def waits_for_streams(spec: Spec) -> bool:
    """Return whether the engine frees blocks that another CUDA stream still uses (`Requests.drop_used`).

    DeepSpeed's stage 3 does, too (runtime/zero/partition_parameters.py, free_param), but is replayed as if its streams
    were on time.
    """
    options = state_options(spec)
    return options.engine == "fsdp1" and options.data_parallel > 1


def takes_gradients_over(options: StateOptions) -> bool:
    """Return whether the run's engine takes over gradients: sharded gradients do not stay where autograd put them."""
    return options.flattens_weights or (options.engine in ("fsdp1", "fsdp2") and options.data_parallel > 1)


def arriving_gradients(spec: Spec, engine: Engine, *, exist: bool) -> GradientPolicy:
    """Return the policy for gradients that autograd produces; an engine may take them over afterwards."""
    sharded, unsharded = not engine.keeps_gradients, engine.has_unsharded_gradients
    if engine.hooks_gradients:
        return GradientPolicy(kept=sharded or not exist, main_dtype=None)
    return gradient_policy(spec, exist=unsharded or (exist and not sharded), sharded=sharded)


def gradient_names(spec: Spec, units: Mapping[int, Sequence[LocalParameter]]) -> dict[int, dict[str, LocalParameter]]:
    """Return the parameters of each unit by the names of their gradients in programs.

    A module in PEFT's `modules_to_save` has the gradients of its trained copy.
    """
    found: dict[int, dict[str, LocalParameter]] = {}
    for unit, parameters in units.items():
        names = found[unit] = {}
        for parameter in parameters:
            name = _gradient_name(parameter, spec.training.implementation)
            if parameter.trains or name not in names:
                names[name] = parameter
    if spec.model.tie_word_embeddings and spec.parallelism.pipeline_parallel == 1:  # named after the head
        found[ROOT].setdefault("lm_head.weight", units[ROOT][0])  # tied embeddings are the root's
    return found


def _gradient_name(parameter: LocalParameter, implementation: str) -> str:
    """Return the name of a parameter's gradient in its block's program."""
    module = parameter.module.rpartition("*.")[2].removesuffix(".saved")  # PEFT's copy runs in place of the module
    if parameter.routed and implementation == "plain":  # "mlp.experts.up" for the matmuls of all experts
        module = module.removesuffix("_proj")
    return f"{module}.{parameter.tensor}"
