"""Forward passes of a generation that may set its peak, and the state of a layer's KV cache before and after each."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from math import ceil
from typing import NamedTuple

from memcalc.architectures.kv_cache import KEPT, SO_FAR
from memcalc.architectures.options.attention import LayerKVCache
from memcalc.spec.defaults import kernel_in_fp32
from memcalc.spec.hardware.kernels import FLASH_LARGEST_HEAD
from memcalc.spec.inference import InferenceSpec
from memcalc.spec.model import ModelSpec
from memcalc.spec.spec import Spec

# A forward pass of one layer takes about 70 microseconds to record and replay: a second in all. Of a longer generation
# fewer are replayed: a sample is no exact replay, and the search for the largest batch makes about 30.
MOST_LAYERS_PLAYED, LAYERS_OF_SAMPLE = 16_384, 4_096

PREFILL, FIRST, LAST = "prefill", "decode_1", "decode_last"
PHASES = ("model", "input", PREFILL, FIRST, LAST)
DECODE = "decode"  # forwards between the first and the last new token: never the peak, so not a phase of results


class Forward(NamedTuple):
    """One forward pass of a generation."""

    phase: str  # its phase
    tokens: int  # tokens processed per sequence
    before: int  # tokens per sequence in the cache before it

    @property
    def after(self) -> int:
        """Tokens per sequence in the cache afterwards."""
        return self.before + self.tokens


class LayerCache(NamedTuple):
    """The KV cache of one layer in a forward pass."""

    usage: LayerKVCache  # how the forward uses it
    before: int  # tokens per sequence that it holds before the forward
    after: int  # tokens per sequence that it holds after the forward

    @property
    def values(self) -> dict[str, int]:
        """The symbols of its axes."""
        return {SO_FAR: self.before, KEPT: self.after, f"{KEPT}+1": self.after + 1}


def phases_of(inference: InferenceSpec) -> tuple[str, ...]:
    """Return the phases of a run; without new tokens there is none after the prompt's, and one token is the first."""
    return PHASES[: PHASES.index(PREFILL) + 1 + min(inference.new_tokens, len((FIRST, LAST)))]


def forwards_of(inference: InferenceSpec) -> Iterator[Forward]:
    """Yield the first, the last full and the remaining chunk of the prompt, and the first and last new token."""
    prompt, chunk = inference.prompt_length, inference.chunk
    whole, rest = divmod(prompt, chunk)
    starts = dict.fromkeys((0, (whole - 1) * chunk))
    yield from (Forward(PREFILL, chunk, start) for start in starts)
    if rest:
        yield Forward(PREFILL, rest, whole * chunk)
    if inference.new_tokens:
        yield Forward(FIRST, 1, prompt)
    if inference.new_tokens > 1:
        yield Forward(LAST, 1, inference.context_length - 1)


def all_forwards(inference: InferenceSpec) -> Iterator[Forward]:
    """Yield every forward of a run with a cache of transformers, in order.

    With a static cache all forwards of new tokens are identical; two represent those between the first and the last.
    """
    prompt, end = inference.prompt_length, inference.context_length
    yield Forward(PREFILL, prompt, 0)
    if inference.new_tokens:
        yield Forward(FIRST, 1, prompt)
    between = range(prompt + 1, end - 1)
    for before in between[:2] if inference.cache == "static" else between:
        yield Forward(DECODE, 1, before)
    if inference.new_tokens > 1:
        yield Forward(LAST, 1, end - 1)


def is_long(inference: InferenceSpec, layers: int) -> bool:
    """Return whether not every forward is replayed."""
    return layers * sum(1 for _ in islice(all_forwards(inference), MOST_LAYERS_PLAYED + 1)) > MOST_LAYERS_PLAYED


def played_forwards(inference: InferenceSpec, layers: int) -> Iterator[Forward]:
    """Yield the forwards that are replayed: of a long generation every n-th one between the first and the last token.

    With a quarter of the forwards three generations of Llama 3 8B reserve up to 0.75% less, with an eighth up to 1.5%.
    """
    forwards = [*all_forwards(inference)]
    every = ceil(len(forwards) * layers / LAYERS_OF_SAMPLE) if is_long(inference, layers) else 1
    yield from (*forwards[:2], *forwards[2:-1:every], *forwards[2:][-1:])


def layer_cache(spec: Spec, forward: Forward, *, windowed: bool) -> LayerCache:
    """Return the KV cache of a layer before and after a forward; `windowed`: of a layer with a sliding window."""
    inference = spec.inference
    assert inference is not None
    if inference.cache == "paged":
        axis = "s" if spec.model.mla is not None else KEPT
        visible = forward.before
        if windowed:
            visible = min(visible, spec.model.sliding_window - 1)
        return LayerCache(
            LayerKVCache("paged", first=forward.before == 0, keys=axis), visible, visible + forward.tokens
        )
    grouped = spec.model.num_key_value_heads != spec.model.num_attention_heads
    kind = _dynamic if inference.cache == "dynamic" else _static
    found = kind(spec.model, inference, forward, windowed=windowed)
    # A single query of grouped heads becomes one for each head of its group (sdpa_attention.py, pack_gqa).
    masked = found.usage.masked or lacks_flash(spec.model)
    several = spec.model.num_key_value_heads > 1  # a single head is repeated as a view
    repeats = grouped and several and forward.tokens > 1 and masked and spec.model.mla is None
    own = inference.program == "generate"
    return found._replace(usage=found.usage._replace(repeats=repeats, own_positions=own))


def attention_kernel(spec: Spec, *, masked: bool) -> str:
    """Return the kernel of a layer's forward: scaled_dot_product_attention takes what its arguments allow.

    Flash attention takes 16-bit dtypes without a mask; the memory-efficient kernel takes no grouped heads, which
    transformers passes if there is no mask. The math kernel takes the rest.
    """
    training, model = spec.training, spec.model
    if training.attention == "eager" or training.implementation != "huggingface":
        return training.attention
    if masked or lacks_flash(model):
        return "memory-efficient"
    if training.attention == "flash" and training.dtype != "fp32":
        return "flash"
    release = None if training.versions is None else training.versions.transformers
    return kernel_in_fp32(release, grouped=model.num_key_value_heads != model.num_attention_heads)


def lacks_flash(model: ModelSpec) -> bool:
    """Return whether flash attention has no kernel for heads: too large, or with values of another dimension."""
    return model.mla is not None or model.head_dim > FLASH_LARGEST_HEAD


def _dynamic(model: ModelSpec, inference: InferenceSpec, forward: Forward, *, windowed: bool) -> LayerCache:
    """Return a dynamic cache; a sliding window is a view of the storage created for all visible tokens.

    transformers 5.23 cache_utils.py, DynamicSlidingWindowLayer: the last w - 1 tokens are a view of that storage.
    """
    first = forward.before == 0
    if not windowed:
        return LayerCache(LayerKVCache("dynamic", first, KEPT), forward.before, forward.after)
    seen = model.sliding_window - 1
    visible = min(forward.before, seen)
    in_prompt = forward.before == inference.prompt_length
    storage = forward.before if first or in_prompt else min(forward.before - 1, seen) + 1
    shown = visible + forward.tokens
    # masking_utils.py, _ignore_causal_mask_sdpa: a window no longer than the visible tokens needs its mask.
    masked = inference.attention != "eager" and shown >= model.sliding_window
    return LayerCache(LayerKVCache("dynamic", first, KEPT, window=True, masked=masked), storage, shown)


def _static(model: ModelSpec, inference: InferenceSpec, forward: Forward, *, windowed: bool) -> LayerCache:
    """Return a static cache: one size from the first forward on; except in the first, unwritten tokens are masked."""
    first, eager = forward.before == 0, inference.attention == "eager"
    room = min(model.sliding_window, inference.context_length) if windowed else inference.context_length
    passes = first and forward.tokens > room
    full = windowed and room == model.sliding_window
    masked = not eager and (not first or full)
    keys = KEPT if (eager or not first or full) and not passes else "s"
    slides = full and not first and forward.before >= room
    how = LayerKVCache("static", first, keys, windowed, masked, slides=slides, passes=passes)
    return LayerCache(how, 0 if first else room, room)
