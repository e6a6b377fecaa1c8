"""KV cache size: bytes per token, bytes per sequence, and the blocks of a paged cache."""

from __future__ import annotations

from typing import NamedTuple

from memcalc.allocator.pytorch.block_sizes import rounded
from memcalc.layout.stages import Stage
from memcalc.ledger.component import Component
from memcalc.ledger.row_drafts import RowDraft
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.spec.spec import Spec

VLLM = "vllm 001cabc1 vllm/v1/kv_cache_interface.py: FullAttentionSpec, SlidingWindowSpec, MLAAttentionSpec"


class CacheWidth(NamedTuple):
    """Elements that one layer caches per token on one rank."""

    elements: int  # number of elements
    formula: str  # the number in symbols
    dtype: str  # dtype of the cache

    @property
    def bytes(self) -> int:
        """Bytes per token."""
        return self.elements * item_bytes(self.dtype)


def item_bytes(dtype: str) -> int:
    """Return the bytes of one element of a cache."""
    return 1 if dtype == "fp8" else DTYPE_BYTES[dtype]


def token_width(spec: Spec) -> CacheWidth:
    """Return a layer's cache per token: key and value of each key/value head on the rank, or MLA's shared latent."""
    assert spec.inference is not None
    model, ranks = spec.model, spec.parallelism.tensor_parallel
    dtype = spec.inference.dtype if spec.inference.kv_cache_dtype == "compute" else spec.inference.kv_cache_dtype
    if model.mla is not None:  # replicated on every rank: all heads read it
        return CacheWidth(model.mla.kv_lora_rank + model.mla.qk_rope_head_dim, "(r_kv+d_r)", dtype)
    heads = max(model.num_key_value_heads // ranks, 1)  # with more ranks than heads, heads are replicated
    return CacheWidth(2 * heads * model.head_dim, "2·h_kv·d_h" if ranks == 1 else "2·h_kv/t·d_h", dtype)


def windowed_layers(spec: Spec, first: int, stop: int) -> int:
    """Return how many layers from `first` up to but not including `stop` have a sliding window."""
    return sum(spec.model.has_window(layer) for layer in range(first, stop)) if spec.model.sliding_window else 0


def cached_tokens(spec: Spec, tokens: int, *, windowed: bool) -> int:
    """Return the tokens of one sequence that a layer keeps after `tokens` tokens, in whole blocks of a paged cache.

    For a sliding window vLLM keeps the tokens that the next forward reads, and one more block, since the window may
    begin inside a block.
    """
    inference = spec.inference
    assert inference is not None
    block = inference.block
    if windowed and spec.model.sliding_window < tokens:
        if inference.cache != "paged":
            return min(tokens, spec.model.sliding_window)
        shown = min(spec.model.sliding_window - 1 + inference.chunk, tokens)
        return (-(-shown // block) + 1) * block
    return -(-tokens // block) * block


def symbols_of(spec: Spec) -> dict[str, int]:
    """Return the symbols of formulas at the end of the context."""
    inference = spec.inference
    assert inference is not None
    tokens = inference.context_length
    return {
        "n_0": inference.prompt_length,
        "n_c": tokens,
        "n_b": tokens - 1,
        "n_p": cached_tokens(spec, tokens, windowed=False),
        "n_w": cached_tokens(spec, tokens, windowed=True),
    }


def pool_items(spec: Spec, stage: Stage, mask: int) -> list[RowDraft]:
    """Return the blocks of a paged cache on a rank: one tensor per layer, for the full context of all sequences."""
    inference = spec.inference
    assert inference is not None
    if inference.cache != "paged":
        return []
    width, items = token_width(spec), []
    slide = windowed_layers(spec, stage.first, stage.stop)
    for windowed, count in ((False, stage.layers - slide), (True, slide)):
        kept = cached_tokens(spec, inference.context_length, windowed=windowed)
        tokens = inference.batch_size * kept
        each = tokens * width.bytes
        name = "blocks of a window" if windowed else "blocks"
        formula = f"{item_bytes(width.dtype)}·b·{'n_w' if windowed else 'n_p'}·{width.formula}"
        shape = (tokens // inference.block, inference.block, width.elements)
        dtype = "uint8" if width.dtype == "fp8" else width.dtype
        item = RowDraft(
            Component.KV_CACHE, "layers.*", name, shape, dtype, count, each, rounded(each), mask, formula, VLLM
        )
        items += [item] if count else []
    return items


def cache_bytes(spec: Spec, tokens: int) -> int:
    """Return the bytes of the cache of one sequence with `tokens` tokens, over all layers, on one tensor-parallel rank.

    Counts the tokens; the storages of a dynamic cache with a sliding window can be larger for a while.
    """
    total = spec.model.num_layers
    slide = windowed_layers(spec, 0, total)
    width = token_width(spec).bytes
    full = (total - slide) * cached_tokens(spec, tokens, windowed=False)
    return (full + slide * cached_tokens(spec, tokens, windowed=True)) * width
