"""PyTorch's math kernel of scaled_dot_product_attention: separate operators, called by one function.

transformers takes it in fp32 for grouped heads without a mask (`enable_gqa`), which no fused kernel supports there.
Unlike transformers' eager attention it scales queries and keys instead of scores, makes a causal mask in each layer,
masks scores in place, and returns no probabilities.
"""

from __future__ import annotations

from memcalc.architectures.structure import BlockStructure
from memcalc.operators import Operators
from memcalc.programs.tape import Tensor

CITATION = "ATen native/transformers/attention.cpp, _scaled_dot_product_attention_math"


def math_attention(
    ops: Operators, c: BlockStructure, q: Tensor, k: Tensor, v: Tensor, head_size: str, *, by_head: bool
) -> Tensor:
    """Return causal attention by the math kernel, by token.

    Saves the copied or scaled queries, the scaled keys, the values per query head, and the probabilities. In generation
    a single query reads all keys, so nothing is masked, and its layouts by head and by token are the same.

    Args:
        ops: the operators.
        c: the structure.
        q: queries, (b, s, h, head_size).
        k: keys, (b, keys, h_kv, head_size).
        v: values, as the keys.
        head_size: axis of the features of a head.
        by_head: whether the queries are contiguous by head, as matmuls read them.
    """
    tape, keys, several = ops.tape, c.keys, c.cache is None or c.cache.first
    queries = ops.scale(q, "scaled q")
    masks = (_causal_mask(ops, c),) if several else ()
    repeated = ("b", keys, "h", head_size)
    k, v = ops.copy(k, "k for each head", repeated), ops.copy(v, "v for each head", repeated)
    copies = ("q by head" if several and c.batched and not by_head else "", "")
    scores = ops.matmul(queries, ops.scale(k, "scaled k"), "scores", ("b", "h", "s", keys), copies)
    for mask in masks:
        scores = ops.add_in_place(scores, mask, "masked scores")
    probabilities = ops.safe_softmax(scores, "attention probabilities")
    dropped = ops.dropout(probabilities, "attention probabilities dropout", c.attention.dropout)
    core = ops.matmul(dropped, v, "attention output", ("b", "s", "h", head_size))
    tape.still_referenced(queries, *masks, k, v)  # variables of the C++ function
    return ops.copy(core, "attention output by token", reorders=c.batched) if several else core


def _causal_mask(ops: Operators, c: BlockStructure) -> Tensor:
    """Write the mask that each call makes for itself: as bool, its triangle, and in the dtype of the scores."""
    square = ("s", "s")
    ones = ops.table("ones", square, "bool", CITATION)
    truth = ops.table("causal mask, truth", square, "bool", CITATION, of=(ones,))
    return ops.table("causal mask of the kernel", square, c.dtypes.compute, CITATION, of=(truth,))
