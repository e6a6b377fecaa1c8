"""KV cache of generation, and the logits of the next token.

Sources: transformers 5.23 cache_utils.py, DynamicLayer.update, DynamicSlidingWindowLayer.update, StaticLayer.update;
integrations/sdpa_attention.py; generation/utils.py, GenerationMixin._sample. A paged cache is vLLM's: its kernels
write and read its blocks in place (vllm/v1/attention/backends/flash_attn.py).
"""

from __future__ import annotations

from collections.abc import Callable

from memcalc.architectures.math_attention import math_attention
from memcalc.architectures.options.attention import LayerKVCache
from memcalc.architectures.structure import BlockStructure
from memcalc.architectures.tensor_parallel import TensorParallelOps
from memcalc.ledger.component import Component
from memcalc.operators import Operators
from memcalc.programs import operator_workspaces
from memcalc.programs.tape import NEW, ForwardMemory, Node, Shape, Tape, Tensor
from memcalc.spec.recipes import DTYPE_BYTES

CACHE = "transformers 5.23 cache_utils.py"
WITHOUT_GROUPS = ("falcon",)  # passes fewer key heads than query heads to sdpa, without enable_gqa
KEPT, SO_FAR = "n_c", "n_b"  # tokens that a layer's cache holds after this forward, and before it


def write_mask(tape: Tape, c: BlockStructure) -> None:
    """Write the mask that a kernel needs, created once per forward and shared by all layers and sequences."""
    if c.cache is not None and c.cache.masked:
        mask = tape.store("mask", ("s", c.keys), "bool", "transformers 5.23 masking_utils.py: sdpa_mask")
        tape.live.held.add(mask)


def cached(ops: Operators, cache: LayerKVCache, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Write keys and values of this forward to the cache; return what attention reads.

    A dynamic cache is a new tensor, longer by the new tokens, concatenated from the old cache and the new keys or
    values. The old one is freed afterwards. The other types are updated in place.
    """
    if cache.cache_type == "paged":
        return key, value  # the kernel reads the blocks; the pool is persistent
    keys, *before = _kept(ops, cache, "keys", key)
    values, *_ = _kept(ops, cache, "values", value)
    ops.tape.still_referenced(key, value)  # referenced until the attention module has both
    if cache.window:  # both new windows are created before either replaces its old one
        ops.tape.still_referenced(*before)
    return (key, value) if cache.passes else (keys, values)


def _kept(ops: Operators, cache: LayerKVCache, name: str, x: Tensor) -> tuple[Tensor, ...]:
    """Return the cache including x; then the cache before, where that is another tensor."""
    tape = ops.tape

    def store(axis: str, label: str = name, component: Component = Component.KV_CACHE) -> Tensor:
        shape = (x.shape[0], axis, *x.shape[2:])
        return Tensor(tape.store(label, shape, x.dtype, CACHE, component=component), shape, x.dtype, grad=False)

    made = store(KEPT)
    tape.live.held.add(made.storage)
    if cache.cache_type == "static":
        if cache.first:
            tape.record(Node(f"{name} of the cache", (x,), (made,), (), (None,)))
            return (made,)
        tape.live.given.add(made.storage)
        rolled = (store(KEPT, f"{name} moved by a token", Component.TEMPORARIES),) if cache.slides else ()
        held = tuple(each.storage for each in rolled)
        seen = Tensor(made.storage, made.shape, x.dtype, grad=False)
        tape.record(
            Node(f"{name} of the cache", (x, made), (seen,), (), (None, None), forward=ForwardMemory(temporaries=held))
        )
        return (seen,)
    before: tuple[Tensor, ...] = ()
    if not cache.first:
        before = (store(SO_FAR, f"{name} so far"),)
        tape.live.given.add(before[0].storage)
    tape.record(Node(f"{name} of the cache", (*before, x), (made,), (), (None,) * (1 + len(before))))
    return made, *before


def cached_attention(
    ops: Operators,
    c: BlockStructure,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axes: tuple[str, str, str],
    out: Shape | None = None,
    *,
    by_head: bool = False,
) -> Tensor:
    """Fused attention over the cache; with a mask the memory-efficient kernel.

    Args:
        ops: the operators.
        c: the structure.
        q: queries.
        k: keys.
        v: values.
        axes: query heads, key/value heads, and the head dimension.
        out: axes of the output, where they differ from those of q.
        by_head: whether queries are contiguous by head; flash attention's output then has their strides.
    """
    cache = c.cache
    assert cache is not None
    heads, kv_heads, width = axes
    if c.family in WITHOUT_GROUPS and c.attention.grouped:
        return math_attention(ops, c, q, k, v, width, by_head=by_head, masked=True)
    if not cache.masked and c.attention.kernel == "flash" and not c.attention.pads_heads:
        core = ops.flash_attention(q, k, v, heads, kv_heads, width, ("s", cache.keys), splits=True, out=out)
        return ops.copy(core, "attention output by token") if by_head and cache.first else core
    if not cache.masked and c.attention.kernel == "math":
        return math_attention(ops, c, q, k, v, width, by_head=by_head)
    tape = ops.tape
    if cache.repeats:
        k = ops.copy(k, "k for each head", ("b", cache.keys, heads, width))
        v = ops.copy(v, "v for each head", ("b", cache.keys, heads, width))
    sizes = {"heads": heads, "head_dim": width, "value_dim": (out or q.shape)[-1], "length": "s"}
    rule = operator_workspaces.named(operator_workspaces.efficient_forward, **sizes, item_bytes=DTYPE_BYTES[q.dtype])
    temporaries = [
        tape.store("attention fp32 output", (), "uint8", "ATen native/transformers/cuda/attention.cu", rule=rule)
    ]
    if cache.masked:
        # ATen native/transformers/attention.cpp, convert_boolean_attn_mask
        citation = "ATen native/transformers/attention.cpp"
        temporaries.insert(0, tape.store("mask in dtype", ("b", "s", cache.keys), q.dtype, citation))
    y = tape.new("attention output", out or q.shape, q.dtype, "ATen native/transformers/cuda/attention.cu")
    held = tuple(temporaries)
    tape.record(Node("attention", (q, k, v), (y,), (), (NEW,) * 3, forward=ForwardMemory(temporaries=held)))
    return y


def write_next_token(
    ops: Operators, c: BlockStructure, x: Tensor, width: str, returned: Callable[[Tensor], Tensor] | None = None
) -> None:
    """Write the logits of the last token, and their fp32 copy, from which the next token is selected.

    Args:
        ops: the operators.
        c: the structure.
        x: output of the final norm.
        width: its last axis.
        returned: function that returns the logits that the model returns; None: those of the LM head.
    """
    tape, split = ops.tape, TensorParallelOps(ops, c)
    vocabulary = c.sharding.axis("V")
    last = Tensor(x.storage, ("b", "1", width), x.dtype, grad=False)
    tape.record(Node("last token", (x,), (last,), (), (None,)))
    logits = split.column(last, "lm_head", (vocabulary, width), ("b", "1", vocabulary), bias=c.head.bias)
    logits = logits if returned is None else returned(logits)
    whole = logits
    if c.sharding.tensor_parallel:
        whole = tape.new("logits of all ranks", ("b", "1", "V"), logits.dtype, "all_gather along the vocabulary")
        tape.record(Node("logits of all ranks", (logits,), (whole,), (), (None,)))
    wide = tape.new("logits in fp32", ("b", "V"), "fp32", "transformers 5.23 generation/utils.py: _sample")
    tape.record(Node("logits in fp32", (whole,), (wide,), (), (None,)))
    tape.still_referenced(logits)  # variable of the model's output
