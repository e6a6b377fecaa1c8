"""Buffers of torch.distributed.pipelining: what a stage receives, and what FSDP2 keeps gathered on it.

Sources: torch 2.13 distributed/pipelining/stage.py, _setup_forward_recv_info, _create_grad_recv_info.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from memcalc.allocator.pytorch.block_sizes import rounded
from memcalc.layout.local_parameters import LocalParameter, LocalParameters, stage_parameters, without_companions
from memcalc.layout.schedules import uses_pipelining
from memcalc.layout.stages import Stage
from memcalc.ledger.component import Component
from memcalc.ledger.row_drafts import RowDraft, from_phase, mask_of
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.spec.spec import Spec
from memcalc.states.gathered_parameters import gathered_bytes, gathered_dtype
from memcalc.states.state_options import StateOptions, state_options

BACKWARD = mask_of(*(f"backward_{step}" for step in (1, 2)))
PASSES = BACKWARD | mask_of(*(f"{each}_{step}" for step in (1, 2) for each in ("forward", "loss")))


def drains(spec: Spec) -> bool:
    """Return whether gradients are reduced when no micro-batch is in flight: after the last one of a pipeline."""
    return uses_pipelining(spec) or spec.parallelism.has_pipeline_engine


def keeps_passed_on(spec: Spec) -> bool:
    """Return whether buffers of DeepSpeed's engine reference what stages receive and send, not a rank's part of it."""
    return spec.parallelism.has_pipeline_engine and spec.parallelism.tensor_parallel == 1


def lists_sent(spec: Spec) -> bool:
    """Return whether PyTorch's schedule keeps all that a step has sent: those of several chunks do."""
    return uses_pipelining(spec) and spec.parallelism.schedule == "interleaved"


def keeps_sent(spec: Spec) -> bool:
    """Return whether PyTorch's schedule keeps a sent activation until its micro-batch's backward has returned."""
    return uses_pipelining(spec) and not lists_sent(spec)


def received(spec: Spec, stage: Stage) -> Iterator[RowDraft]:
    """Yield the buffers of tensors that a stage exchanges with others, from the first step on, except `in_passes`.

    One receive buffer for each micro-batch and direction stays allocated. In forward and backward, blocks already count
    one received gradient as that of their output. Under 1F1B a sent gradient is referenced until the next one is sent.
    """
    before, behind = received_tensors(spec, stage)
    sends_back = before and spec.parallelism.schedule == "1f1b"
    steps = from_phase("forward_1") & ~PASSES
    yield from _rows(
        spec,
        ("activations received", before, steps, "_setup_forward_recv_info"),
        ("gradients received", behind - 1, PASSES | steps, "_create_grad_recv_info"),
        ("gradients received", 1 if behind else 0, steps, "_create_grad_recv_info"),
        ("gradient sent", 1 if sends_back else 0, PASSES, "get_bwd_send_ops"),
    )


def in_passes(spec: Spec, *, received: int, sent: int) -> Iterator[RowDraft]:
    """Yield the activations that a stage has received, and all that a step has sent, in forward and backward.

    Args:
        spec: the run.
        received: buffers of activations, without those that blocks count as their inputs.
        sent: tensors that the schedule keeps, if it `lists_sent`.
    """
    yield from _rows(
        spec,
        ("activations received", received, PASSES, "_setup_forward_recv_info"),
        ("activations and gradients sent", sent, PASSES, "schedules.py: send_ops"),
    )


def received_tensors(spec: Spec, stage: Stage) -> tuple[int, int]:
    """Return how many activations, and how many gradients, a stage receives in a step."""
    micro_batches = spec.training.gradient_accumulation_steps
    before = micro_batches * sum(not chunk.has_embedding for chunk in stage.chunks)
    behind = micro_batches * sum(not chunk.has_head for chunk in stage.chunks)
    return before, behind


def _rows(spec: Spec, *found: tuple[str, int, int, str]) -> Iterator[RowDraft]:
    for name, count, mask, source in found:
        if count > 0:
            citation = f"torch 2.13 distributed/pipelining/stage.py: {source}"
            yield passed_on(spec)._replace(tensor=name, count=count, mask=mask, citation=citation)


def gathers_stages(spec: Spec) -> bool:
    """Return whether FSDP2 shards the stages of PyTorch's schedules."""
    parallelism = spec.parallelism
    ranks = parallelism.shards * parallelism.data_parallel_replicate
    return parallelism.engine == "fsdp2" and ranks > 1 and uses_pipelining(spec)


def gathered_stage(spec: Spec, stage: Stage, *, resharded: bool = False) -> RowDraft:
    """Return the parameters of a chunk that FSDP2 has gathered, from the first forward of a step to the last backward.

    No backward reshards them before the gradients are reduced (torch 2.13 distributed/pipelining/stage.py,
    backward_maybe_with_nosync).

    Args:
        spec: the run.
        stage: the chunk.
        resharded: whether a forward at stage 3 has resharded its layers.
    """
    options = state_options(spec)
    parameters = without_companions(stage_parameters(spec, stage))
    if resharded:
        parameters = LocalParameters(each for each in parameters if _stays_gathered(each, options))
    sizes = [(each.count, gathered_bytes(each, options)) for each in parameters]
    total, blocks = (sum(count * size_of(size) for count, size in sizes) for size_of in (int, rounded))
    dtypes = {gathered_dtype(each, options) for each in parameters}
    dtype = dtypes.pop() if len(dtypes) == 1 else "uint8"
    item = DTYPE_BYTES[dtype]
    tensor = (Component.COMMUNICATION_BUFFERS, "engine", "stage parameters, gathered", (total // item,), dtype)
    citation = "torch 2.13 distributed/pipelining/stage.py: set_reshard_after_backward(False)"
    return RowDraft(*tensor, 1, total, blocks, PASSES, f"{item}·P_stage", citation)


def _stays_gathered(parameter: LocalParameter, options: StateOptions) -> bool:
    """Return whether forward does not reshard a parameter: one of the root module or of the LM head's unit."""
    if parameter.where == "layer":
        return False
    if options.fsdp.wraps_embedding_and_head:
        return parameter.where == "head"
    return not options.fsdp.reshards_root


def passed_on(spec: Spec) -> RowDraft:
    """Return the hidden states that a stage sends for one micro-batch: the rank's part of the sequence."""
    training, parallelism = spec.training, spec.parallelism
    ranks = parallelism.context_parallel * (parallelism.tensor_parallel if parallelism.sequence_parallel else 1)
    shape = (training.sequences, -(-training.row_length // ranks), spec.model.hidden_size)
    size = DTYPE_BYTES[training.dtype]
    each = size * prod(shape)
    given = (each, rounded(each), PASSES, f"{size}·b·s{'/(c·t)' if ranks > 1 else ''}·d", "")
    return RowDraft(Component.COMMUNICATION_BUFFERS, "engine", "", shape, training.dtype, 1, *given)
