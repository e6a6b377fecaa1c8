"""PyTorch's math kernel of scaled_dot_product_attention: separate operators, called by one function.

transformers takes it in fp32 for grouped heads without a mask (`enable_gqa`), which no fused kernel supports there, and
in generation also in 16 bits where flash attention is disabled.
Unlike transformers' eager attention it scales queries and keys instead of scores, makes a causal mask in each layer,
masks scores in place, and returns no probabilities.
"""

from __future__ import annotations

from memcalc.architectures.structure import BlockStructure
from memcalc.operators import Operators
from memcalc.programs.tape import Tensor

CITATION = "ATen native/transformers/attention.cpp, _scaled_dot_product_attention_math"


def math_attention(
    ops: Operators,
    c: BlockStructure,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    head_size: str,
    *,
    by_head: bool,
    masked: bool = False,
) -> Tensor:
    """Return causal attention by the math kernel, by token.

    Saves the copied or scaled queries, the scaled keys, the values per query head, and the probabilities. In generation
    a single query reads all keys, so nothing is masked, and its layouts by head and by token are the same.

    Args:
        ops: the operators.
        c: the structure.
        q: queries, (b, s, heads, head_size).
        k: keys, (b, keys, h_kv, head_size).
        v: values, as the keys.
        head_size: axis of the features of a head.
        by_head: whether the queries are contiguous by head, as matmuls read them.
        masked: whether it gets a boolean mask, and a key head for all queries without enable_gqa (Falcon).
    """
    tape, keys, several = ops.tape, c.keys, c.cache is None or c.cache.first
    dtype, casts = q.dtype, tuple[Tensor, ...]()
    given = (ops.table("mask in dtype", ("b", "s", keys), dtype, CITATION),) if masked else ()
    if dtype != "fp32":  # 16-bit tensors are computed in fp32
        q, k, v = ops.cast(q, "fp32"), ops.cast(k, "fp32"), ops.cast(v, "fp32")
        casts = (q, k, v)
    queries = ops.scale(q, "scaled q")
    masks = given or ((_causal_mask(ops),) if several else ())
    heads = q.shape[2]
    repeated = ("b", keys, heads, head_size)
    repeats = c.attention.grouped and not masked
    if repeats:
        k, v = ops.copy(k, "k for each head", repeated), ops.copy(v, "v for each head", repeated)
    by_token = c.batched and not repeats  # keys and values; repeated ones are contiguous by head
    copies = ("q by head" if several and c.batched and not by_head else "", "k by head" if by_token else "")
    expands = repeated if masked else ()
    scores = ops.matmul(queries, ops.scale(k, "scaled k"), "scores", ("b", heads, "s", keys), copies, expands=expands)
    # Under a dispatch mode, such as that of checkpoints by operator, into a new tensor (areAnyTensorSubclassLike).
    add = ops.add if c.implementation == "torchtitan" and c.saving.selective else ops.add_in_place
    for mask in masks:
        scores = add(scores, mask, "masked scores")
    probabilities = ops.safe_softmax(scores, "attention probabilities")
    dropped = ops.dropout(probabilities, "attention probabilities dropout", c.attention.dropout)
    if casts:
        casts = (*casts, ops.cast(dropped, dtype, "attention probabilities in dtype"))  # returned, too
    copies = ("", "v by head" if by_token else "")
    core = ops.matmul(dropped, v, "attention output", ("b", "s", heads, head_size), copies, expands=expands)
    if casts:
        core = ops.cast(core, dtype)
        casts = (*casts, dropped)
    tape.still_referenced(queries, *masks, k, v, *casts)  # variables of the C++ function
    return ops.copy(core, "attention output by token", reorders=c.batched) if several else core


def _causal_mask(ops: Operators) -> Tensor:
    """Write the mask that each call makes for itself: as bool, its triangle, and in the dtype of the scores."""
    square = ("s", "s")
    ones = ops.table("ones", square, "bool", CITATION)
    truth = ops.table("causal mask, truth", square, "bool", CITATION, of=(ones,))
    return ops.table("causal mask of the kernel", square, "fp32", CITATION, of=(truth,))
