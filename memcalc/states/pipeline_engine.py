"""Tensors that DeepSpeed's pipeline engine keeps for each micro-batch, apart from those that autograd saves.

A stage has at least two pipeline buffers. Each references the input and the output of a micro-batch, and the buffers of
the last stage reference its logits until another micro-batch takes the buffer, also between steps. With tensor
parallelism each rank sends and receives its part of the hidden states. Source: DeepSpeed 0.19 runtime/pipe/engine.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from memcalc.allocator.pytorch.block_sizes import rounded
from memcalc.architectures.structure import block_structure
from memcalc.layout.schedules import FEWEST_PIPE_BUFFERS, pipe_buffers
from memcalc.layout.stages import Stage
from memcalc.ledger.component import Component
from memcalc.ledger.row_drafts import RowDraft, from_phase, mask_of
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.spec.spec import Spec
from memcalc.states.pipelining import BACKWARD, PASSES, passed_on

FORWARD = mask_of("forward_1", "forward_2")
STEPS = from_phase("forward_1")
CURRENT = PASSES & ~FORWARD  # the passes in which a pipeline buffer has the logits of the current micro-batch
SOURCE = "DeepSpeed 0.19 runtime/pipe/engine.py:"
MASK, SENT_MASK = "bool", "fp16"  # dtypes of an attention mask, and of one that is sent


class _Kept(NamedTuple):
    """Equal tensors of one name.

    Args:
        name: the name in rows.
        count: how many there are.
        shape: of one.
        dtype: of all.
        mask: the phases in which they are live.
        formula: bytes of one in symbols.
        source: the function of the engine.
    """

    name: str
    count: int  # type: ignore[assignment] # hides tuple.count, which nothing here needs
    shape: tuple[int, ...]
    dtype: str
    mask: int
    formula: str
    source: str


def kept_between_passes(spec: Spec, stage: Stage) -> Iterator[RowDraft]:
    """Yield the receive buffers of a stage, and its logits of earlier micro-batches."""
    yield from _rows(_buffers(spec, stage))
    yield from _rows(_earlier_inputs(spec, stage))
    yield from _logits(spec, stage)


def loaded_batches(spec: Spec, stage: Stage) -> Iterator[RowDraft]:
    """Yield what the first and the last stage have loaded for each pipeline buffer."""
    training, micro_batches = spec.training, spec.training.gradient_accumulation_steps
    shape = training.sequences, training.row_length
    buffers = min(pipe_buffers(spec.parallelism.pipeline_parallel, stage.index, micro_batches), micro_batches)
    each = prod(shape) * DTYPE_BYTES["int64"]
    given = (each, rounded(each), STEPS, "8·b·s", f"{SOURCE} _exec_load_micro_batch")
    for name, count in (("token and position ids", 2 * stage.has_embedding), ("labels", int(stage.has_head))):
        if count:
            yield RowDraft(Component.INPUTS, "batch", name, shape, "int64", count * buffers, *given)


def kept_in_flight(spec: Spec, stage: Stage, in_flight: int) -> Iterator[RowDraft]:
    """Yield what the pipeline buffers reference in forward and backward."""
    yield from _rows(_in_flight(spec, stage, in_flight))


def _buffers(spec: Spec, stage: Stage) -> Iterator[_Kept]:
    """Yield the buffers of one received activation and one received gradient, which stay allocated.

    A stage that receives both has one buffer for them (_allocate_or_extend_buffers). In backward, blocks count the
    received gradient as that of their output.
    """
    (shape, formula), dtype = _part(spec), spec.training.dtype
    if not stage.has_embedding:
        mask = STEPS if stage.has_head else STEPS & ~BACKWARD
        yield _Kept("activation received", 1, shape, dtype, mask, formula, "_exec_recv_activations")
        if _passes_mask(spec):
            bytes_of = f"2·{_mask_formula(spec)}"
            yield _Kept("mask received", 1, _mask_shape(spec), SENT_MASK, STEPS, bytes_of, "_exec_recv_activations")
    if stage.has_embedding and not stage.has_head:
        mask = STEPS & ~mask_of("forward_1") & ~BACKWARD
        yield _Kept("gradient received", 1, shape, dtype, mask, formula, "_exec_recv_grads")


def _in_flight(spec: Spec, stage: Stage, in_flight: int) -> Iterator[_Kept]:
    training, whole, (part, formula) = spec.training, passed_on(spec), _part(spec)
    splits = spec.parallelism.tensor_parallel > 1
    written = block_structure(spec).embedding.places_each  # EmbeddingPipe is on the tape
    tokens = training.sequences, training.row_length
    if not stage.has_head and splits:  # otherwise they are in the recorded passes: memcalc/simulation/step_recorder.py
        source = "_exec_forward_pass, outputs"
        yield _Kept("activations sent", in_flight, part, training.dtype, PASSES, formula, source)
        name, source = "output and its gradient, gathered", "_exec_backward_pass, PartitionedTensor.full"
        yield _Kept(name, 2, whole.shape, whole.dtype, BACKWARD, whole.formula, source)
    if stage.has_embedding and training.dropout and not written:
        name, source = "mask of the embedding's dropout", "EmbeddingPipe of Megatron-DeepSpeed and GPT-NeoX"
        yield _Kept(name, in_flight, (*tokens, spec.model.hidden_size), MASK, PASSES, "b·s·d", source)
    if stage.has_embedding and not written:
        name, source = "token and position ids, copied", "_exec_forward_pass, clone"
        yield _Kept(name, 2 * in_flight, tokens, "int64", PASSES, "8·b·s", source)
    if _passes_mask(spec):
        source, formula, shape = "_exec_forward_pass, clone", _mask_formula(spec), _mask_shape(spec)
        yield _Kept("attention masks", 2 * in_flight, shape, MASK, PASSES, formula, source)
        yield _Kept("mask sent", 1, shape, SENT_MASK, PASSES, f"2·{formula}", "_exec_send_activations")


def _earlier_inputs(spec: Spec, stage: Stage) -> Iterator[_Kept]:
    """Yield the inputs of the last stage, and their gradients, which the graphs of the logits in buffers reference."""
    if stage.has_embedding or not stage.has_head:
        return
    whole, buffers = passed_on(spec), min(FEWEST_PIPE_BUFFERS, spec.training.gradient_accumulation_steps)
    name, source, current = "inputs of earlier micro-batches, and gradients", "_exec_backward_pass, outputs", CURRENT
    yield _Kept(name, 2 * buffers, whole.shape, whole.dtype, STEPS & ~current, whole.formula, source)
    yield _Kept(name, 2 * (buffers - 1), whole.shape, whole.dtype, current, whole.formula, source)


def _logits(spec: Spec, stage: Stage) -> Iterator[RowDraft]:
    """Yield the logits of micro-batches after their backward; the blocks count those of the current one.

    _exec_backward_pass of the last stage does not release `outputs`.
    """
    if not stage.has_head:
        return
    training, parallelism = spec.training, spec.parallelism
    dtype = "fp32" if training.logits_dtype == "fp32" else training.dtype
    split = "/t" if parallelism.tensor_parallel > 1 else ""
    shape = (training.sequences, training.row_length, _vocabulary(spec))
    formula = f"{DTYPE_BYTES[dtype]}·b·s·V{split}"
    buffers = min(FEWEST_PIPE_BUFFERS, training.gradient_accumulation_steps)
    current = CURRENT
    name, source = "logits of earlier micro-batches", "_exec_backward_pass"
    kept = (
        _Kept(name, buffers, shape, dtype, STEPS & ~current, formula, source),
        _Kept(name, buffers - 1, shape, dtype, current, formula, source),
    )
    yield from (row._replace(component=Component.LOGITS_AND_LOSS, module="head") for row in _rows(kept))


def _rows(found: Iterator[_Kept] | tuple[_Kept, ...]) -> Iterator[RowDraft]:
    for kept in found:
        if kept.count > 0:
            each = prod(kept.shape) * DTYPE_BYTES[kept.dtype]
            given = (each, rounded(each), kept.mask, kept.formula, f"{SOURCE} {kept.source}")
            component = Component.COMMUNICATION_BUFFERS
            yield RowDraft(component, "engine", kept.name, kept.shape, kept.dtype, kept.count, *given)


def _part(spec: Spec) -> tuple[tuple[int, ...], str]:
    """Return the shape of a rank's part of the hidden states that are sent, and the formula of its bytes."""
    whole, ranks = passed_on(spec), spec.parallelism.tensor_parallel
    if ranks == 1:
        return whole.shape, whole.formula
    return (-(-prod(whole.shape) // ranks),), f"{whole.formula}/t"


def _passes_mask(spec: Spec) -> bool:
    return spec.parallelism.pipeline_tensors in ("with-shared-mask", "with-masks")


def _mask_shape(spec: Spec) -> tuple[int, int, int]:
    masks = spec.training.sequences if spec.parallelism.pipeline_tensors == "with-masks" else 1
    return masks, spec.training.row_length, spec.training.row_length


def _mask_formula(spec: Spec) -> str:
    return "b·s²" if spec.parallelism.pipeline_tensors == "with-masks" else "s²"


def _vocabulary(spec: Spec) -> int:
    return -(-spec.model.vocab_size // spec.parallelism.tensor_parallel)
