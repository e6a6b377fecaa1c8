"""Buffers of torch.distributed.pipelining: what a stage receives, and what FSDP2 keeps gathered on it.

Sources: torch 2.13 distributed/pipelining/stage.py, _setup_forward_recv_info, _create_grad_recv_info.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from memcalc.allocator.pytorch.block_sizes import rounded
from memcalc.layout.local_parameters import stage_parameters, without_companions
from memcalc.layout.stages import Stage
from memcalc.ledger.component import Component
from memcalc.ledger.row_drafts import RowDraft, from_phase, mask_of
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.spec.spec import Spec
from memcalc.states.gathered_parameters import gathered_bytes, gathered_dtype
from memcalc.states.state_options import state_options

BACKWARD = mask_of(*(f"backward_{step}" for step in (1, 2)))
PASSES = BACKWARD | mask_of(*(f"{each}_{step}" for step in (1, 2) for each in ("forward", "loss")))


def uses_pipelining(spec: Spec) -> bool:
    """Return whether stages run in PyTorch's schedules: neither Megatron's nor DeepSpeed's."""
    parallelism = spec.parallelism
    other = parallelism.engine in ("megatron", "deepspeed") or spec.training.implementation == "megatron"
    return parallelism.pipeline_parallel > 1 and not other


def received(spec: Spec, stage: Stage) -> Iterator[RowDraft]:
    """Yield the buffers of tensors that a stage exchanges with others, from the first step on.

    One receive buffer for each micro-batch and direction stays allocated. In forward and backward, blocks already count
    the buffers of micro-batches in flight as their inputs, and one received gradient as that of their output. A sent
    tensor is referenced until backward has returned; under 1F1B, a sent gradient until the next one is sent.
    """
    micro_batches = spec.training.gradient_accumulation_steps
    before = micro_batches * sum(not chunk.has_embedding for chunk in stage.chunks)
    behind = micro_batches * sum(not chunk.has_head for chunk in stage.chunks)
    sends_back = before and spec.parallelism.schedule == "1f1b"
    steps = from_phase("forward_1") & ~PASSES
    flying = min(before, stage.in_flight)
    found = (
        ("activations received", before - flying, PASSES | steps, "_setup_forward_recv_info"),
        ("activations received", flying, steps, "_setup_forward_recv_info"),
        ("gradients received", behind - 1, PASSES | steps, "_create_grad_recv_info"),
        ("gradients received", 1 if behind else 0, steps, "_create_grad_recv_info"),
        ("activations sent", stage.in_flight - 1 if behind else 0, PASSES, "forward_one_chunk, fwd_cache"),
        ("activation sent", 1 if behind else 0, BACKWARD, "forward_one_chunk, fwd_cache"),
        ("gradient sent", 1 if sends_back else 0, PASSES, "get_bwd_send_ops"),
    )
    for name, count, mask, source in found:
        if count > 0:
            citation = f"torch 2.13 distributed/pipelining/stage.py: {source}"
            yield passed_on(spec)._replace(tensor=name, count=count, mask=mask, citation=citation)


def gathered_stage(spec: Spec, stage: Stage) -> RowDraft:
    """Return the parameters of a stage that FSDP2 has gathered, from the first forward of a step to the last backward.

    No backward reshards them before the gradients are reduced (torch 2.13 distributed/pipelining/stage.py,
    backward_maybe_with_nosync).
    """
    options = state_options(spec)
    parameters = [each for each in without_companions(stage_parameters(spec, stage)) if not each.beside]
    sizes = [(each.count, gathered_bytes(each, options)) for each in parameters]
    total, blocks = (sum(count * size_of(size) for count, size in sizes) for size_of in (int, rounded))
    dtypes = {gathered_dtype(each, options) for each in parameters}
    dtype = dtypes.pop() if len(dtypes) == 1 else "uint8"
    item = DTYPE_BYTES[dtype]
    tensor = (Component.COMMUNICATION_BUFFERS, "engine", "stage parameters, gathered", (total // item,), dtype)
    citation = "torch 2.13 distributed/pipelining/stage.py: set_reshard_after_backward(False)"
    return RowDraft(*tensor, 1, total, blocks, PASSES, f"{item}·P_stage", citation)


def passed_on(spec: Spec) -> RowDraft:
    """Return the hidden states that a stage sends for one micro-batch: the rank's part of the sequence."""
    training, parallelism = spec.training, spec.parallelism
    ranks = parallelism.context_parallel * (parallelism.tensor_parallel if parallelism.sequence_parallel else 1)
    shape = (training.sequences, -(-training.row_length // ranks), spec.model.hidden_size)
    size = DTYPE_BYTES[training.dtype]
    each = size * prod(shape)
    given = (each, rounded(each), PASSES, f"{size}·b·s{'/(c·t)' if ranks > 1 else ''}·d", "")
    return RowDraft(Component.COMMUNICATION_BUFFERS, "engine", "", shape, training.dtype, 1, *given)
