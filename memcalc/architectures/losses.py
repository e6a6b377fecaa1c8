"""LM head and loss of a model, in the variant that the run uses."""

from __future__ import annotations

from collections.abc import Callable

from memcalc.architectures.structure import BlockStructure
from memcalc.architectures.tensor_parallel import TensorParallelOps
from memcalc.operators import Operators
from memcalc.programs.tape import Shape, Tensor
from memcalc.spec.training import TOKENWISE


def write_loss(
    ops: Operators,
    c: BlockStructure,
    x: Tensor,
    width: str,
    finished: Callable[[Tensor], Tensor] | None = None,
    *,
    fp32_logits: bool = False,
) -> None:
    """Write LM head and loss, starting from the last hidden state.

    Args:
        ops: the operators, with their tape.
        c: the structure.
        x: the last hidden state.
        width: its last axis.
        finished: function that the model applies to the LM head's output, for example soft-capping.
        fp32_logits: whether the model returns logits in fp32 (CodeGen).
    """
    tape = ops.tape
    if c.head.classifies:
        _score(ops, c, x, width)
        return
    vocabulary = c.sharding.axis("V")
    tape.begin_head()
    if c.loss.kind == "chunked" and not c.loss.recomputes:
        _of_chunks(ops, c, x, (vocabulary, width))
        return
    if c.loss.kind in TOKENWISE:
        _name(ops, c, x)  # the step's variable references the hidden state instead of logits
        tape.end_forward()
        if c.loss.kind == "tiled":
            ops.tiled_cross_entropy(x, (vocabulary, width), c.head.parameters, tied=c.embedding.tied)
        elif c.loss.kind == "fused":
            ops.fused_cross_entropy(x, (vocabulary, width), tied=c.embedding.tied)
        else:
            ops.chunked_cross_entropy(x, (vocabulary, width), c.loss.chunks, bias=c.head.bias, tied=c.embedding.tied)
        return
    split, normed = TensorParallelOps(ops, c), x
    x = split.module_input(x, "lm_head")
    logits = split.column(
        x, "lm_head", (vocabulary, width), ("b", "s", vocabulary), bias=c.head.bias, tied=c.embedding.tied
    )
    if c.sharding.dtensor and c.loss.kind != "vocab-parallel":
        logits = ops.gathered_columns(logits, "logits", ("b", "s", "V"))
    if c.sharding.dtensor:
        tape.still_referenced(normed, x)  # the LM head's argument, and its replacement
    if finished is not None:
        logits = finished(logits)
        tape.still_referenced(x)  # hidden_states
    if c.head.fp32_output:
        logits = ops.cast(logits, "fp32", "logits in fp32")
    _name(ops, c, logits)
    tape.end_forward()
    _loss_of(ops, c, logits, fp32_logits=fp32_logits)


def _of_chunks(ops: Operators, c: BlockStructure, x: Tensor, shape: Shape) -> None:
    """Write LM head and loss, chunk by chunk; `shape`: that of the LM head's weight."""
    tape, dtype, chunks = ops.tape, "fp32" if c.head.fp32_output else "", c.loss.chunks
    if not c.loss.chunks_head:
        logits = ops.linear(x, "lm_head", shape, ("b", "s", shape[0]), bias=c.head.bias, tied=c.embedding.tied)
        logits = ops.cast(logits, dtype or logits.dtype, "logits in fp32")
        _name(ops, c, logits)
        tape.end_forward()
        ops.cross_entropy_by_chunk(ops.chunks_of_logits(logits, chunks))
        return
    parts = ops.logits_by_chunk(x, shape, chunks, bias=c.head.bias, tied=c.embedding.tied, dtype=dtype)
    for part in parts:
        _name(ops, c, part)
    tape.end_forward()
    if c.loss.divergence:
        divergence = ops.divergence(ops.rows_of(parts), c.loss.divergence, c.loss.teacher_logits)
        ops.add_losses(divergence, ops.cross_entropy_by_chunk(ops.rows_of(parts)))
        return
    ops.cross_entropy_by_chunk(parts)


def _score(ops: Operators, c: BlockStructure, x: Tensor, width: str) -> None:
    """transformers modeling_layers.py, GenericForSequenceClassification: scores of all tokens, of which one is used.

    The loss (trl/trainer/reward_trainer.py, compute_loss) is a few numbers per sequence.
    """
    ops.tape.begin_head()
    scores = ops.linear(x, "score", ("n_l", width), ("b", "s", "n_l"), bias=False)
    pooled = ops.gather(scores, ("b", "n_l"), "pooled scores")
    _name(ops, c, pooled)
    ops.tape.end_forward()
    ops.tape.hold(ops.pointwise(pooled, "loss of each sequence"))


def _loss_of(ops: Operators, c: BlockStructure, logits: Tensor, *, fp32_logits: bool) -> None:
    """Write the loss of all logits."""
    if c.loss.divergence:
        divergence = ops.divergence(ops.rows_of((logits,)), c.loss.divergence, c.loss.teacher_logits)
        (rows,) = ops.rows_of((logits,))
        ops.add_losses(divergence, ops.cross_entropy(ops.cast(rows, "fp32", "logits in fp32")))
        return
    if c.loss.kind == "selective":
        copies, averages = c.loss.copies_scored_logits, c.loss.averages_logits
        ops.tape.hold(ops.selective_log_softmax(logits, copies=copies, averages=averages))
        return
    if c.loss.kind == "gathered":
        ops.tape.hold(ops.gathered_log_softmax(logits, apart=c.loss.scores_apart))
        return
    if not c.loss.upcasts_logits:
        ops.cross_entropy(logits, dtype="fp32" if c.dtypes.autocast else logits.dtype)
        return
    if c.loss.kind == "vocab-parallel" and c.sharding.dtensor:
        ops.loss_parallel(ops.cast(logits, "fp32", "logits in fp32"))
        return
    if c.loss.kind == "vocab-parallel":
        ops.tape.hold(ops.mean_of_tokens(ops.vocab_parallel_cross_entropy(logits)))
        return
    if fp32_logits:
        logits = ops.cast(logits, "fp32", "logits in fp32")
    wide = ops.cast(logits, "fp32", "logits in fp32")
    if c.loss.shifts_logits:
        ops.cross_entropy(*ops.shifted_logits(wide, batched=c.batched))
        return
    theirs = c.implementation == "huggingface"
    ops.cross_entropy(wide, labels=ops.shifted_labels(batched=c.batched) if theirs else None)


def _name(ops: Operators, c: BlockStructure, output: Tensor) -> None:
    """Keep the model's output live as the loop references it: through backward, or until the loss exists."""
    if c.head.drops_logits:
        ops.tape.live.region.add(output.storage)
    else:
        ops.tape.hold(output)
