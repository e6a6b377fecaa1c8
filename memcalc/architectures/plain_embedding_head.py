"""Embedding, final norm, LM head and loss of the reference decoder, and tensors shared by its layers."""

from __future__ import annotations

from memcalc.architectures.kv_cache import write_mask, write_next_token
from memcalc.architectures.losses import write_loss
from memcalc.architectures.norms import norm
from memcalc.architectures.structure import BlockStructure
from memcalc.architectures.tensor_parallel import TensorParallelOps
from memcalc.ledger.component import Component
from memcalc.operators import Operators
from memcalc.programs.program import SharedTable
from memcalc.programs.tape import Shape, Tape, Tensor

PAPER = "Korthikanti et al. (arXiv 2205.05198) section 4.1"


def plain_embedding(c: BlockStructure) -> tuple[Tape, Tensor]:
    """Token and position embeddings, summed; and the tensors that all layers share."""
    tape = Tape()
    ops = Operators(tape, c.dtypes, c.linears)
    stream = c.sharding.tokens
    width = "d_e" if c.embedding.separate_size else "d"
    vocabulary = c.sharding.axis("V")
    if c.sharding.dtensor:
        x = split_embedding(ops, c, width)
    else:
        view = c.head_gradient_is_a_view
        tied, copied = c.embedding.tied, c.embedding.places_each  # the ids that forward reads are copies
        x = ops.embedding("embed_tokens", (vocabulary, width), ("b", stream), tied=tied, counts=copied, view=view)
    if c.embedding.separate_size:
        x = ops.linear(x, "project_in", ("d", "d_e"), ("b", stream, "d"), bias=False)
    if c.position.kind == "learned" and c.embedding.places_each:
        positions = ops.embedding("embed_positions", (c.position.table, "d"), ("b", stream), counts=True)
        x = ops.add(x, positions, "embedding sum")
    elif c.position.kind == "learned":
        positions = ops.embedding("embed_positions", (c.position.table, "d"), (stream,), counts=True)
        x = ops.broadcast_add(x, positions, "embedding sum")
    if c.embedding.norm:
        x = norm(ops, c.norm, x, "embed_norm")
    x = ops.dropout(x, "embedding dropout", c.embedding.dropout)
    shared_tables(tape, c)
    return tape, x


def split_embedding(ops: Operators, c: BlockStructure, width: str) -> Tensor:
    """An embedding with rows that DTensor shards (RowwiseParallel): the rank's rows, summed across ranks."""
    whole = c.sharding.unsharded_embedding_gradient
    rows = ops.split_rows("embed_tokens", width, ("b", "s"), tied=c.embedding.tied, whole_gradient=whole)
    return TensorParallelOps(ops, c).summed(rows, "embed_tokens output")


def shared_tables(tape: Tape, c: BlockStructure) -> None:
    """Write the causal mask and RoPE cos/sin cache, created once per forward, live until backward has passed."""
    write_mask(tape, c)
    ops = Operators(tape, c.dtypes, c.linears)
    if c.attention.kernel == "eager":
        _held(ops, "causal mask", ("s", c.keys), "bool", ops.table("all tokens", ("s", c.keys), "bool"))
    if c.position.kind == "alibi":
        bias = ops.table("ALiBi's bias in fp32", ("h", "s"), "fp32", component=Component.TEMPORARIES)
        if c.dtypes.compute != "fp32":
            bias = ops.table("ALiBi's bias", ("h", "s"), c.dtypes.compute, component=Component.TEMPORARIES, of=(bias,))
        (tape.live.held if c.saving.checkpoints_layers else tape.live.names).add(bias.storage)
    if c.position.kind == "rope" and not c.projections.mla:
        counted = ops.table("positions", ("s",), "fp32")
        halves = ops.table("angles of pairs", ("s", "d_h/2"), "fp32", of=(counted,))
        angles = ops.table("angles", ("s", "d_h"), "fp32", of=(halves,))
        tape.still_referenced(counted, halves)
        for name, function in (("cosines", "cos"), ("sines", "sin")):
            if c.dtypes.compute == "fp32":
                _held(ops, name, ("s", "d_h"), "fp32", angles)
            else:
                wide = ops.table(f"{function} in fp32", ("s", "d_h"), "fp32", of=(angles,))
                _held(ops, name, ("s", "d_h"), c.dtypes.compute, wide)
        tape.still_referenced(angles)


def _held(ops: Operators, name: str, shape: Shape, dtype: str, of: Tensor) -> None:
    citation = "made once in each forward, shared by all layers"
    ops.tape.hold(ops.table(name, shape, dtype, citation, Component.TEMPORARIES, (of,), SharedTable(name)))


def plain_head(c: BlockStructure) -> tuple[Tape, None]:
    """Final norm, LM head, and the loss on fp32 logits."""
    tape = Tape(saved_component=Component.LOGITS_AND_LOSS)
    ops = Operators(tape, c.dtypes, c.linears)
    stream = c.sharding.tokens
    dtype = c.stream
    x = tape.input("head input", ("b", stream, "d"), dtype, f"{PAPER}.3")
    if c.head.norm:
        given = x
        x = norm(ops, c.norm, x, "norm")
        tape.still_referenced(given)
    width = "d"
    if c.embedding.separate_size:
        width = "d_e"
        x = ops.linear(x, "project_out", ("d_e", "d"), ("b", stream, "d_e"), bias=False)
    if c.cache is not None:
        write_next_token(ops, c, x, width)
    else:
        write_loss(ops, c, x, width)
    return tape, None
