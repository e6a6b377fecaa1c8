"""torchtitan's Llama, operator by operator, under FSDP2 with bf16 parameters and fp32 reduction.

Sources: torchtitan ba2469780 (December 2024) torchtitan/models/llama/model.py, torchtitan/parallelisms/
parallelize_llama.py (selective recomputation by operator), train.py (the logits are freed before backward).
"""

from __future__ import annotations

from memcalc.architectures.structure import BlockStructure
from memcalc.ledger.component import Component
from memcalc.operators import Operators
from memcalc.programs.tape import Tape, Tensor

SOURCE = "torchtitan ba2469780 torchtitan/models/llama/model.py"


def write(c: BlockStructure, part: str) -> tuple[Tape, Tensor | None]:
    """Return the tape of one part of the model, and its output."""
    tape = Tape(saved_component=Component.LOGITS_AND_LOSS if part == "head" else Component.ACTIVATIONS)
    ops = Operators(tape, c.compute, c.compute, autocast=False)
    ops.float8 = c.float8
    if part == "embedding":
        return tape, ops.embedding("embed_tokens", ("V", "d"), ("b", "s"))
    if part == "head":
        return _head(c, tape, ops)
    return _layer(c, tape, ops)


def rms_norm(ops: Operators, c: BlockStructure, x: Tensor, module: str) -> Tensor:
    """torch.nn.RMSNorm: one kernel since torch 2.9, separate operators before."""
    if c.composite_norms:
        return ops.composite_rms_norm(x, module, "d")
    return ops.rms_norm(x, module, "d")


def _head(c: BlockStructure, tape: Tape, ops: Operators) -> tuple[Tape, None]:
    x = tape.input("head input", ("b", "s", "d"), c.compute, SOURCE)
    x = rms_norm(ops, c, x, "norm")
    tape.begin_head()
    logits = ops.linear(x, "lm_head", ("V", "d"), ("b", "s", "V"), bias=False)
    tape.region.add(logits.storage)  # train.py: `del pred` comes between the loss and its backward
    tape.end_forward()
    ops.cross_entropy(ops.cast(logits, "fp32", "logits in fp32"))
    return tape, None


def _layer(c: BlockStructure, tape: Tape, ops: Operators) -> tuple[Tape, Tensor]:
    tokens = ("b", "s")
    x = tape.input("layer input", (*tokens, "d"), c.compute, SOURCE)
    normed = rms_norm(ops, c, x, "input_norm")
    width = "d" if c.square else "h·d_h"
    kv_width = width if not c.grouped else "h_kv·d_h"
    kv_heads = "h_kv" if c.grouped else "h"
    products = [
        ops.linear(normed, f"attention.{name}_proj", (out, "d"), (*tokens, heads, "d_h"), bias=False)
        for name, out, heads in (("q", width, "h"), ("k", kv_width, kv_heads), ("v", kv_width, kv_heads))
    ]
    q, k, v = (_rotated(ops, products[0], "q"), _rotated(ops, products[1], "k"), products[2])
    if c.grouped:
        heads = (*tokens, "h", "d_h")
        k, v = ops.copy(k, "k for each head", heads), ops.copy(v, "v for each head", heads)
    core = ops.flash_attention(q, k, v, "h", "h", "d_h", "s", splits=True)
    attention = tape.nodes[-1]
    products.append(ops.linear(core, "attention.o_proj", ("d", width), (*tokens, "d"), bias=False))
    x = ops.add(x, products[-1], "attention sum")
    normed = rms_norm(ops, c, x, "post_attention_norm")
    inner = "4·d" if c.usual_intermediate_size else "F"
    gate = ops.linear(normed, "mlp.gate_proj", (inner, "d"), (*tokens, inner), bias=False)
    activated = ops.pointwise(gate, "mlp.silu")
    up = ops.linear(normed, "mlp.up_proj", (inner, "d"), (*tokens, inner), bias=False)
    down = ops.linear(
        ops.mul(activated, up, "mlp.silu(gate) * up"), "mlp.down_proj", ("d", inner), (*tokens, "d"), bias=False
    )
    products += [gate, up, down]
    output = ops.add(x, down, "layer output")
    if c.selective:
        # Every second matmul is recomputed, starting with the second; attention's results are kept.
        kept = [product.storage for product in products[::2]]
        made = [tensor.storage for tensor in attention.outputs] + list(attention.also_allocates)
        tape.recompute_all((*kept, *made))
    return tape, output


def _rotated(ops: Operators, x: Tensor, name: str) -> Tensor:
    """apply_rotary_emb: pairs of features as complex fp32 numbers, times a cache, and back."""
    wide = ops.cast(x, "fp32", f"{name} in fp32")
    return ops.cast(ops.mul_table(wide, f"{name} turned", "fp32"), x.dtype, f"rotated {name}")
