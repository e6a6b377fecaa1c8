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
from memcalc.layout.stages import Stage
from memcalc.ledger.component import Component
from memcalc.ledger.row_drafts import RowDraft, from_phase, mask_of
from memcalc.spec.recipes import DTYPE_BYTES, RECIPES
from memcalc.spec.spec import Spec
from memcalc.states.pipelining import BACKWARD, PASSES, passed_on
from memcalc.states.state_options import state_options

FORWARD = mask_of("forward_1", "forward_2")
STEPS = from_phase("forward_1")
SOURCE = "DeepSpeed 0.19 runtime/pipe/engine.py:"
BUFFERS = 2  # the least number of pipeline buffers of a stage: runtime/pipe/schedule.py, num_pipe_buffers
MASK_BYTES, SENT_MASK_BYTES = 1, 2  # a mask is bool, and fp16 when it is sent


class _Kept(NamedTuple):
    """Equal tensors of one name.

    Args:
        name: the name in rows.
        count: how many there are.
        each: bytes of one.
        mask: the phases in which they are live.
        formula: bytes of one in symbols.
        source: the function of the engine.
    """

    name: str
    count: int  # type: ignore[assignment] # hides tuple.count, which nothing here needs
    each: int
    mask: int
    formula: str
    source: str


def kept_between_passes(spec: Spec, stage: Stage) -> Iterator[RowDraft]:
    """Yield the receive buffers of a stage, its logits of earlier micro-batches, and unused tied parameters."""
    yield from _rows(_buffers(spec, stage))
    yield from _rows(_earlier_inputs(spec, stage))
    yield from _logits(spec, stage)
    yield from _unused_positions(spec, stage)


def kept_in_flight(spec: Spec, stage: Stage, in_flight: int) -> Iterator[RowDraft]:
    """Yield what the pipeline buffers reference in forward and backward.

    Args:
        spec: the run.
        stage: the stage.
        in_flight: micro-batches in flight.
    """
    yield from _rows(_in_flight(spec, stage, in_flight))


def _buffers(spec: Spec, stage: Stage) -> Iterator[_Kept]:
    """Yield the buffers of one received activation and one received gradient, which stay allocated."""
    part, formula = _part(spec)
    if not stage.has_embedding:
        yield _Kept("activation received", 1, part, STEPS, formula, "_exec_recv_activations")
        if _passes_mask(spec):
            elements = _mask_elements(spec)
            formula = f"2·{_mask_formula(spec)}"
            yield _Kept("mask received", 1, SENT_MASK_BYTES * elements, STEPS, formula, "_exec_recv_activations")
    if not stage.has_head:
        yield _Kept("gradient received", 1, part, STEPS & ~FORWARD | BACKWARD, formula, "_exec_recv_grads")


def _in_flight(spec: Spec, stage: Stage, in_flight: int) -> Iterator[_Kept]:
    whole, (part, formula) = passed_on(spec), _part(spec)
    splits = spec.parallelism.tensor_parallel > 1
    if not stage.has_embedding and not splits:  # forward reads a copy; otherwise it reads what is gathered
        yield _Kept("activations received", in_flight, part, PASSES, formula, "_exec_forward_pass, clone")
    if not stage.has_head:
        yield _Kept("activations sent", in_flight, part, PASSES, formula, "_exec_forward_pass, outputs")
    if not stage.has_head and splits:
        source = "_exec_backward_pass, PartitionedTensor.full"
        yield _Kept("output and its gradient, gathered", 2, whole.each, BACKWARD, whole.formula, source)
    if stage.has_embedding and spec.training.dropout:
        training = spec.training
        elements = training.sequences * training.row_length * spec.model.hidden_size
        source = "EmbeddingPipe of Megatron-DeepSpeed and GPT-NeoX"
        yield _Kept("mask of the embedding's dropout", in_flight, elements, PASSES, "b·s·d", source)
    if stage.has_embedding:
        elements = spec.training.sequences * spec.training.row_length
        copies = 4 * in_flight  # token and position ids, and the copies that forward reads
        yield _Kept("token and position ids", copies, 8 * elements, PASSES, "8·b·s", "_exec_load_micro_batch")
    if _passes_mask(spec):
        elements = _mask_elements(spec)
        source, formula = "_exec_forward_pass, clone", _mask_formula(spec)
        yield _Kept("attention masks", 2 * in_flight, MASK_BYTES * elements, PASSES, formula, source)
        yield _Kept("mask sent", 1, SENT_MASK_BYTES * elements, PASSES, f"2·{formula}", "_exec_send_activations")


def _earlier_inputs(spec: Spec, stage: Stage) -> Iterator[_Kept]:
    """Yield the inputs of the last stage, and their gradients, which the graphs of the logits in buffers reference."""
    if stage.has_embedding or not stage.has_head:
        return
    whole, buffers = passed_on(spec), min(BUFFERS, spec.training.gradient_accumulation_steps)
    name, source = "inputs of earlier micro-batches, and gradients", "_exec_backward_pass, outputs"
    yield _Kept(name, 2 * buffers, whole.each, STEPS & ~PASSES, whole.formula, source)
    yield _Kept(name, 2 * (buffers - 1), whole.each, PASSES, whole.formula, source)


def _logits(spec: Spec, stage: Stage) -> Iterator[RowDraft]:
    """Yield the logits of micro-batches after their backward; the blocks count those of the current one.

    _exec_backward_pass of the last stage does not release `outputs`.
    """
    if not stage.has_head:
        return
    training, parallelism = spec.training, spec.parallelism
    dtype = "fp32" if training.logits_dtype == "fp32" else training.dtype
    split = "/t" if parallelism.tensor_parallel > 1 else ""
    each = DTYPE_BYTES[dtype] * training.sequences * training.row_length * _vocabulary(spec)
    formula = f"{DTYPE_BYTES[dtype]}·b·s·V{split}"
    buffers = min(BUFFERS, training.gradient_accumulation_steps)
    current = PASSES & ~FORWARD
    name, source = "logits of earlier micro-batches", "_exec_backward_pass"
    kept = (
        _Kept(name, buffers, each, STEPS & ~current, formula, source),
        _Kept(name, buffers - 1, each, current, formula, source),
    )
    yield from (row._replace(component=Component.LOGITS_AND_LOSS, dtype=dtype, module="head") for row in _rows(kept))


def _unused_positions(spec: Spec, stage: Stage) -> Iterator[RowDraft]:
    """Yield the position embedding of the last stage, which is in the module with the tied weight and is not used.

    Source: gpt_model.py of bigscience-workshop/Megatron-DeepSpeed and gpt2_model.py of EleutherAI/gpt-neox:
    TiedLayerSpec of EmbeddingPipe.
    """
    model, options = spec.model, state_options(spec)
    tied = model.tie_word_embeddings and stage.has_head and not stage.has_embedding
    if not tied or model.position_embedding != "learned":
        return
    elements = (model.max_position_embeddings + model.position_embedding_offset) * model.hidden_size
    recipe = RECIPES[spec.training.recipe]
    size = DTYPE_BYTES[options.base]
    states = (
        (size, Component.WEIGHTS, "weight", options.base, "model", 1),
        *(((4, Component.GRADIENTS, "gradient, summed", "fp32", "optimizer", 1),) if options.sums_apart else ()),
    )
    ranks = options.data_parallel if options.flattens_weights else 1
    if recipe.master is not None:
        states += ((4, Component.MASTER_WEIGHTS, "weight master", "fp32", "optimizer", ranks),)
        states += ((8, Component.OPTIMIZER_STATE, "moments", "fp32", "optimizer_step_1", ranks),)
    for width, component, name, dtype, phase, shards in states:
        count = -(-elements // shards)
        each = width * count
        formula = f"{width}·S·d{'/N' if shards > 1 else ''}"
        citation = "Megatron-DeepSpeed megatron/model/gpt_model.py: TiedLayerSpec of EmbeddingPipe"
        given = (each, rounded(each), from_phase(phase), formula, citation)
        yield RowDraft(component, "embed_positions", f"{name}, on the last stage", (count,), dtype, 1, *given)


def _rows(found: Iterator[_Kept] | tuple[_Kept, ...]) -> Iterator[RowDraft]:
    for kept in found:
        if kept.count > 0:
            given = (kept.each, rounded(kept.each), kept.mask, kept.formula, f"{SOURCE} {kept.source}")
            component = Component.COMMUNICATION_BUFFERS
            yield RowDraft(component, "engine", kept.name, (kept.each,), "uint8", kept.count, *given)


def _part(spec: Spec) -> tuple[int, str]:
    """Return a rank's bytes of the hidden states that are sent, and their formula."""
    whole, ranks = passed_on(spec), spec.parallelism.tensor_parallel
    size = DTYPE_BYTES[spec.training.dtype]
    elements = prod(whole.shape)
    return size * -(-elements // ranks), whole.formula + ("/t" if ranks > 1 else "")


def _passes_mask(spec: Spec) -> bool:
    return spec.parallelism.pipeline_tensors in ("with-shared-mask", "with-masks")


def _mask_elements(spec: Spec) -> int:
    masks = spec.training.sequences if spec.parallelism.pipeline_tensors == "with-masks" else 1
    return masks * spec.training.row_length**2


def _mask_formula(spec: Spec) -> str:
    return "b·s²" if spec.parallelism.pipeline_tensors == "with-masks" else "s²"


def _vocabulary(spec: Spec) -> int:
    return -(-spec.model.vocab_size // spec.parallelism.tensor_parallel)
