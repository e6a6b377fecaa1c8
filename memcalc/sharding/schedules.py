"""Pipeline schedules: the actions of one stage in order, and the Python variables that reference sent tensors.

Source: torch 2.13 distributed/pipelining/schedules.py, the `_step_microbatches` of each class.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Literal, NamedTuple

from memcalc.layout.schedules import ORDERED, VOTES_SINCE, uses_pipelining
from memcalc.layout.stages import Stage
from memcalc.spec.recompute_plan import has_segments
from memcalc.spec.spec import Spec

MOST_GATHERED = 3  # chunks that FSDP2 gathers at a time: _add_unshard_reshard, max_active_stages

SEND_OPS = "send_ops"  # a list of all that a step has sent, which schedules of several chunks clear at the end

# Rounds of as many micro-batches as stages: before the first backward, in the steady state, and at the end.
ROUNDS_PLAYED = 3
MOST_PLAYED = 64  # micro-batches of schedules that keep all that they have sent, so that no round repeats another


class Action(NamedTuple):
    """One step of a schedule.

    Args:
        kind: forward or backward of a micro-batch on a chunk of the stage; an assignment to a variable; or, for FSDP2,
            the gather or the reshard of a chunk's parameters, or the reduction of its gradients.
        variable: the variable that references the sent tensors; for "assign": the variable that is cleared.
        chunk: number of the chunk on this stage.
        micro_batch: number of the micro-batch.
        newest: whether it is the backward of the micro-batch with the latest forward.
    """

    kind: Literal["forward", "backward", "assign", "unshard", "reshard", "reduce"]
    variable: str = ""
    chunk: int = 0
    micro_batch: int = 0
    newest: bool = False


def lacks(spec: Spec) -> Iterator[str]:
    """Yield the properties of a pipeline for which the order of requests is not modelled."""
    training, parallelism, model = spec.training, spec.parallelism, spec.model
    stages, micro_batches = parallelism.pipeline_parallel, training.gradient_accumulation_steps
    several = parallelism.schedule == "interleaved"
    rounds = max(1, micro_batches // stages)
    reasons = {
        "Megatron's or DeepSpeed's schedules": not uses_pipelining(spec),
        f"schedule {parallelism.schedule}": parallelism.schedule not in ORDERED,
        "fewer micro-batches than stages": parallelism.schedule == "1f1b" and micro_batches < stages,
        "micro-batches that are not a multiple of the rounds": several and micro_batches % rounds > 0,
        "context parallelism": parallelism.context_parallel > 1,
        f"engine {parallelism.engine}": parallelism.data_parallel > 1 and parallelism.engine not in ("ddp", "fsdp2"),
        # Its first pass, which infers the shapes of what stages send, is known since then.
        f"torchtitan's interleaved stages before torch {'.'.join(map(str, VOTES_SINCE))}": several
        and training.framework == "torchtitan"
        and training.torch < VOTES_SINCE,
        "several chunks under DDP": parallelism.data_parallel > 1 and several and parallelism.engine == "ddp",
        "modules that are not the reference decoder's": training.implementation not in ("plain", "torchtitan"),
        "autocast": training.autocasts and training.implementation != "torchtitan",  # its recipe is FSDP2's policy
        "adapters": training.lora is not None,
        "FP8": training.fp8 != "none",
        "offloaded activations": training.offload_activations != "none",
        "an average of the weights": training.ema != "none",
        "evaluation": training.evaluation_batch_size is not None,
        "generated completions": training.completion_length is not None,
        "a reference model": training.reference_model,
        f"a loss that is {training.loss}": training.loss not in ("materialized", "vocab-parallel"),
        "a loss over shards of a vocabulary that is whole": training.loss == "vocab-parallel"
        and parallelism.tensor_parallel == 1,
        "a loss without a copy in fp32": not training.loss_upcast,
        "logits in fp32": training.logits_dtype == "fp32",
        "layers in one checkpoint segment": has_segments(training.recompute),
        "embeddings that are not as wide as the model": model.embedding_size != model.hidden_size,
        "a norm of the embeddings": model.embedding_norm,
    }
    yield from (f"pipeline parallelism with {reason}" for reason, is_so in reasons.items() if is_so)


def actions_of(spec: Spec, stage: Stage, first: int | None = None) -> Iterator[Action]:
    """Return the actions of a stage in one step, of the `first` micro-batches; None: of those that are played."""
    micro_batches = played_micro_batches(spec) if first is None else first
    return actions_in(spec.parallelism.schedule, spec.parallelism.pipeline_parallel, stage, micro_batches)


def actions_in(schedule: str, stages: int, stage: Stage, micro_batches: int) -> Iterator[Action]:
    """Return the actions of a stage in one step of a schedule, of `ORDERED`."""
    actions = order_of(schedule, stages, stage, micro_batches)
    if schedule == "interleaved":
        return _with_shards([*actions], micro_batches)
    return chain(actions, (Action("reduce"),))


def order_of(schedule: str, stages: int, stage: Stage, micro_batches: int) -> Iterator[Action]:
    """Return the forwards and backwards of a stage in one step, of `ORDERED`."""
    if schedule == "interleaved":
        return _interleaved(stage.index, stages, len(stage.chunks), micro_batches)
    return (_gpipe if schedule == "gpipe" else _one_forward_one_backward)(stage.index, stages, micro_batches)


def counted_micro_batches(spec: Spec) -> int:
    """Return how many micro-batches formulas count; later ones repeat rounds of as many micro-batches as stages.

    PyTorch's interleaved schedule rejects micro-batches that do not fill its rounds; those that do are counted.
    """
    stages, micro_batches = spec.parallelism.pipeline_parallel, spec.training.gradient_accumulation_steps
    if spec.parallelism.schedule == "gpipe":
        return micro_batches
    rest = micro_batches % stages if spec.parallelism.schedule == "interleaved" else 0
    if rest and micro_batches % max(1, micro_batches // stages) == 0:
        return micro_batches  # rounds of more micro-batches than stages
    return min(micro_batches - rest, ROUNDS_PLAYED * stages)


def played_micro_batches(spec: Spec) -> int:
    """Return how many micro-batches are recorded for a replay."""
    counted = counted_micro_batches(spec)
    if spec.parallelism.schedule != "interleaved":
        return counted
    return min(spec.training.gradient_accumulation_steps, max(counted, MOST_PLAYED))


def _with_shards(actions: Sequence[Action], micro_batches: int) -> Iterator[Action]:
    """Gather the next chunks before each action, and reduce a chunk's gradients after its last backward.

    Source: _add_unshard_reshard, _add_reduce_grad.
    """
    gathered: list[int] = []
    for action, following in zip(actions, _next_chunks(actions), strict=True):
        yield from (Action("reshard", chunk=chunk) for chunk in gathered if chunk not in following)
        yield from (Action("unshard", chunk=chunk) for chunk in following if chunk not in gathered)
        gathered = sorted(following)
        yield action
        if action.kind == "backward" and action.micro_batch == micro_batches - 1:
            yield Action("reduce", chunk=action.chunk)
    yield from (Action("reshard", chunk=chunk) for chunk in gathered)


def _next_chunks(actions: Sequence[Action]) -> list[list[int]]:
    """Return for each action the next chunks, from its own on, in the order in which they come."""
    found: list[list[int]] = []
    following: list[int] = []
    for action in reversed(actions):
        following = [action.chunk, *(chunk for chunk in following if chunk != action.chunk)]
        found.append(following[:MOST_GATHERED])
    return found[::-1]


def _gpipe(stage: int, stages: int, micro_batches: int) -> Iterator[Action]:
    """ScheduleGPipe: all forwards, then all backwards; `ops` is assigned before each backward and after it."""
    del stage, stages
    for number in range(micro_batches):
        yield Action("forward", "ops", 0, number)
    for number in range(micro_batches):
        yield Action("assign", "ops")
        yield Action("backward", "ops", 0, number, number == micro_batches - 1)


def _one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> Iterator[Action]:
    """Schedule1F1B: as many forwards as stages are left, then a backward before each forward."""
    warmup = min(micro_batches, stages - stage)
    for number in range(warmup):
        yield Action("forward", "fwd_sends", 0, number)
    for number in range(micro_batches):
        ahead = min(number + warmup, micro_batches)
        yield Action("backward", "bwd_sends", 0, number, ahead - 1 == number)
        if ahead < micro_batches:
            yield Action("forward", "fwd_sends", 0, ahead)


def _interleaved(stage: int, stages: int, chunks: int, micro_batches: int) -> Iterator[Action]:
    """ScheduleInterleaved1F1B: rounds of as many micro-batches as stages through each chunk.

    A sent tensor is referenced until the schedule waits for all that it has sent, the newest first
    (_PipelineScheduleRuntime, _step_microbatches): NCCL's `Work` stashes it until then
    (csrc/distributed/c10d/ProcessGroupNCCL.cpp, TensorShelf).

    Source: _calculate_single_rank_operations, _get_warmup_ops.
    """
    rounds = max(1, micro_batches // stages)
    size = micro_batches // rounds
    total = chunks * micro_batches
    warmup = min((chunks - 1) * size + 2 * (stages - 1 - stage), total)
    forwards, backwards = [0] * chunks, [0] * chunks

    def forward(operation: int) -> Action:
        chunk = operation // size % chunks
        forwards[chunk] += 1
        return Action("forward", SEND_OPS, chunk, forwards[chunk] - 1)

    def backward(operation: int) -> Action:
        chunk = chunks - 1 - operation // size % chunks
        backwards[chunk] += 1
        return Action("backward", SEND_OPS, chunk, backwards[chunk] - 1)

    for operation in range(warmup):
        yield forward(operation)
    for operation in range(total - warmup):
        yield forward(warmup + operation)
        yield backward(operation)
    for operation in range(total - warmup, total):
        yield backward(operation)
