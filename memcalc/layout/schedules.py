"""Pipeline schedules: the chunks of layers on each stage, and the micro-batches with activations in flight.

A chunk's activations are counted from its forward to its backward. Where a schedule splits backward into input
gradients and weight gradients (zero bubble), tensors for the weight gradients count in full until these have run. Of
the LM head, with the largest tensors (logits), only the tensors for its weight gradient count: the matmul's input
and the gradient of its output (sail-sg/zero-bubble-pipeline-parallelism 47c2c7a00 megatron/core/weight_grad_store.py,
put).

Sources: GPipe (arXiv 1811.06965); 1F1B and interleaved: Megatron-LM (arXiv 2104.04473 section 2.2) and core_r0.14
core/pipeline_parallel/schedules.py, get_pp_rank_microbatches; ZB-H1, ZB-H2: arXiv 2401.10241 section 3 and table 2;
ZB-V, V-Half, V-Min: arXiv 2405.15362 and its table of activation memory; DualPipe, DualPipeV: deepseek-ai/DualPipe,
README, table of memory.
"""

from __future__ import annotations

from typing import NamedTuple

from memcalc.spec.spec import Spec
from memcalc.spec.training import LogitsUntil

FEWEST_PIPE_BUFFERS = 2  # see `pipe_buffers`
ORDERED = ("gpipe", "1f1b", "interleaved")  # the order of their actions is known: memcalc/sharding/schedules.py


# The torch version in which stages vote on the shapes of what they send, and run a first pass where a script names none
# (distributed/pipelining/schedules.py, _initialize_pp_stages).
VOTES_SINCE = (2, 13)


def uses_pipelining(spec: Spec) -> bool:
    """Return whether stages run in PyTorch's schedules: neither Megatron's nor DeepSpeed's."""
    parallelism = spec.parallelism
    other = parallelism.engine in ("megatron", "deepspeed") or spec.training.implementation == "megatron"
    return parallelism.pipeline_parallel > 1 and not other


def pipe_buffers(stages: int, stage: int, micro_batches: int) -> int:
    """Return how many pipeline buffers a stage of DeepSpeed's engine has.

    Source: DeepSpeed 0.19 runtime/pipe/schedule.py, TrainSchedule.num_pipe_buffers.
    """
    return max(FEWEST_PIPE_BUFFERS, min(stages - stage, micro_batches))


def logits_released(spec: Spec) -> LogitsUntil:
    """Return when the logits are released.

    PyTorch's schedules keep a micro-batch's output until its backward (torch 2.13 distributed/pipelining/stage.py,
    _PipelineStageBase.forward_one_chunk: `fwd_cache`), and so does DeepSpeed's pipeline engine (0.19
    runtime/pipe/engine.py, _exec_forward_pass). Without them torchtitan frees it (train.py: `del pred`).
    """
    if uses_pipelining(spec) or spec.parallelism.has_pipeline_engine:
        return "backward"
    return "loss" if spec.training.implementation == "torchtitan" else spec.training.logits_until


class ModelChunk(NamedTuple):
    """Consecutive layers on one stage: part number `part`, from 0, of `of` equal parts of the model."""

    part: int
    of: int


def chunks_of(schedule: str, stages: int, virtual: int, stage: int) -> tuple[ModelChunk, ...]:
    """Return the parts of the model on a stage, in the order of forward.

    1F1B has one part per stage. Interleaving gives each stage every p-th of p·v parts. V schedules go down the stages
    and up again, so the first stage has both embedding and LM head. DualPipe runs the pipeline in both directions, with
    two copies of the weights.
    """
    if schedule == "interleaved":
        return tuple(ModelChunk(stage + chunk * stages, stages * virtual) for chunk in range(virtual))
    if schedule in ("zb-v", "v-half", "v-min", "dualpipe-v"):
        return ModelChunk(stage, 2 * stages), ModelChunk(2 * stages - 1 - stage, 2 * stages)
    if schedule == "dualpipe":
        return ModelChunk(stage, stages), ModelChunk(stages - 1 - stage, stages)
    return (ModelChunk(stage, stages),)


def chunks_in_flight(schedule: str, stages: int, virtual: int, stage: int, micro_batches: int) -> int:
    """Return the maximum number of chunk copies (one chunk, one micro-batch) that a stage holds.

    With p stages, m micro-batches, stage i counted from 0.
    """
    p, m, i = stages, micro_batches, stage
    most = {
        "gpipe": m,  # all forwards come before the first backward
        "1f1b": p - i,  # p-i-1 warm-up forwards and the current one
        # 2(p-i-1) + (v-1)p warm-up forwards of chunks and the current one; on stage 0 that is pv + p - 1.
        "interleaved": 2 * (p - i - 1) + (virtual - 1) * p + 1,
        "zb-h1": p,  # (p-i) full ones and i that wait for their weight gradients
        "zb-h2": 2 * p - 1,  # 2(p-i)-1 full ones and 2i that wait
        "zb-v": 2 * p,  # p micro-batches, each in two chunks; the same for v-half and v-min
        "v-half": 2 * ((p + 2) // 2),
        "v-min": 2 * ((p + 4) // 3),
        "dualpipe": p + 1,
        "dualpipe-v": 2 * p + 1,  # p stages hold the chunks of a pipeline of 2p stages
    }[schedule]
    directions = {"interleaved": virtual, "zb-v": 2, "v-half": 2, "v-min": 2, "dualpipe-v": 2}
    return min(most, m * directions.get(schedule, 1))


class InFlightMicroBatches(NamedTuple):
    """Maximum number of micro-batches in flight in the first and last chunk of the model."""

    first: int  # for the chunk with the embedding
    last: int  # for the chunk with the LM head, before its backward
    waiting: int = 0  # micro-batches that lack only the LM head's weight gradient


def in_flight_micro_batches(
    schedule: str, stages: int, virtual: int, stage: int, micro_batches: int
) -> InFlightMicroBatches:
    """Return the micro-batches that a stage holds for the embedding and the LM head.

    A stage with one chunk holds as many as for its layers. The last stage of a zero-bubble schedule runs each
    micro-batch's backward right after its forward; the others wait for their weight gradients. With several chunks, the
    last chunk runs its backward at once, so logits are live for one micro-batch. Interleaving runs p micro-batches
    through one chunk, then p through the next, so the first chunk starts twice before its first backward.
    """
    if len(chunks_of(schedule, stages, virtual, stage)) == 1:
        held = chunks_in_flight(schedule, stages, virtual, stage, micro_batches)
        waiting = held - 1 if schedule in ("zb-h1", "zb-h2") and stage == stages - 1 else 0
        return InFlightMicroBatches(held, held - waiting, waiting)
    first = (
        2 * stages if schedule == "interleaved" else chunks_in_flight(schedule, stages, virtual, stage, micro_batches)
    )
    return InFlightMicroBatches(min(first, micro_batches), 1)
