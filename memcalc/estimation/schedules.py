"""Pipeline schedules: which chunks of layers a stage holds, and how many micro-batches' activations are in flight.

A chunk's activations are counted from its forward until its backward; where a schedule splits backward into the input's
and the weights' (zero bubble), what the latter needs is counted whole until it has run. Of the head, whose logits are
the largest tensors of all, only what its matrix's gradient needs is: the matrix's input and the gradient of its output
(sail-sg/zero-bubble-pipeline-parallelism 47c2c7a00 megatron/core/weight_grad_store.py, put).

Sources: GPipe (arXiv 1811.06965); 1F1B and interleaved: Megatron-LM (arXiv 2104.04473 section 2.2) and core_r0.14
core/pipeline_parallel/schedules.py, get_pp_rank_microbatches; ZB-H1, ZB-H2: arXiv 2401.10241 section 3 and table 2;
ZB-V, V-Half, V-Min: arXiv 2405.15362 and its table of activation memory; DualPipe, DualPipeV: deepseek-ai/DualPipe,
README, table of memory.
"""

from __future__ import annotations

from typing import NamedTuple


class Chunk(NamedTuple):
    """Neighbouring layers of one stage: one of `of` equal parts of the model, counted from 0."""

    part: int
    of: int


def chunks_of(schedule: str, stages: int, virtual: int, stage: int) -> tuple[Chunk, ...]:
    """The parts of the model that a stage holds, in the order of forward.

    1F1B's stages hold one part each; interleaved ones every p-th of p·v parts; V schedules go down the stages and up
    again, so that the first one has both ends; DualPipe runs the pipeline in both directions, with two copies of the
    weights.
    """
    if schedule == "interleaved":
        return tuple(Chunk(stage + chunk * stages, stages * virtual) for chunk in range(virtual))
    if schedule in ("zb-v", "v-half", "v-min", "dualpipe-v"):
        return Chunk(stage, 2 * stages), Chunk(2 * stages - 1 - stage, 2 * stages)
    if schedule == "dualpipe":
        return Chunk(stage, stages), Chunk(stages - 1 - stage, stages)
    return (Chunk(stage, stages),)


def chunks_in_flight(schedule: str, stages: int, virtual: int, stage: int, micro_batches: int) -> int:
    """How many chunk copies (one chunk, one micro-batch) a stage holds when it holds most.

    With p stages, m micro-batches, stage i counted from 0.
    """
    p, m, i = stages, micro_batches, stage
    most = {
        "gpipe": m,  # every forward before the first backward
        "1f1b": p - i,  # p-i-1 warm-up forwards and the one at hand
        # 2(p-i-1) + (v-1)p warm-up forwards of chunks and the one at hand; on stage 0 that is pv + p - 1.
        "interleaved": 2 * (p - i - 1) + (virtual - 1) * p + 1,
        "zb-h1": p,  # (p-i) whole and i that wait for their weights' gradient
        "zb-h2": 2 * p - 1,  # 2(p-i)-1 whole and 2i that wait
        "zb-v": 2 * p,  # p micro-batches, each in two chunks; likewise below
        "v-half": 2 * ((p + 2) // 2),
        "v-min": 2 * ((p + 4) // 3),
        "dualpipe": p + 1,
        "dualpipe-v": 2 * p + 1,  # p stages hold the chunks of a pipeline of 2p
    }[schedule]
    directions = {"interleaved": virtual, "zb-v": 2, "v-half": 2, "v-min": 2, "dualpipe-v": 2}
    return min(most, m * directions.get(schedule, 1))


class Ends(NamedTuple):
    """How many micro-batches the chunks at both ends of the model hold when each holds most.

    Args:
        first: of the chunk with the embedding.
        last: of the chunk with the head, whole.
        waiting: of which the head's backward has run but for its matrix's gradient.
    """

    first: int
    last: int
    waiting: int = 0


def ends_in_flight(schedule: str, stages: int, virtual: int, stage: int, micro_batches: int) -> Ends:
    """What a stage holds of both ends of the model.

    A stage with one chunk holds as many of the end it has as of its layers; the last one of a zero bubble runs each
    micro-batch's backward right after its forward, and the others wait for their weights' gradient. With several chunks
    the last one hands over to its own backward at once, so logits are there for one micro-batch. Interleaving runs p
    micro-batches through a chunk, then as many through the next, so the first chunk starts twice before its first
    backward.
    """
    if len(chunks_of(schedule, stages, virtual, stage)) == 1:
        held = chunks_in_flight(schedule, stages, virtual, stage, micro_batches)
        waiting = held - 1 if schedule in ("zb-h1", "zb-h2") and stage == stages - 1 else 0
        return Ends(held, held - waiting, waiting)
    first = (
        2 * stages if schedule == "interleaved" else chunks_in_flight(schedule, stages, virtual, stage, micro_batches)
    )
    return Ends(min(first, micro_batches), 1)
