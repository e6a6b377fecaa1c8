"""What transformers' attention holds when a sequence fills a layer's window, and formulas do not count."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.spec.spec import Spec
from memcalc.units import format_bytes


def window_notes(spec: Spec) -> Iterator[str]:
    """That there is a mask then, and what it costs."""
    more = masked_bytes(spec)
    if more:
        yield (
            f"sequence_length fills the window of {spec.model.sliding_window} tokens: transformers' sdpa then hands "
            f"PyTorch a mask, which its flash attention does not take: up to {format_bytes(more)} more than counted. "
            "attn_implementation flash_attention_2 needs no mask."
        )


def masked_bytes(spec: Spec) -> int:
    """What layers with a filled window keep more under `sdpa` than under flash attention; 0 where none is filled.

    Each keeps the mask in the step's dtype, 2·s², and keys and values repeated for each query head in place of their
    own. Source: transformers 5.23 masking_utils.py (no mask below `local_attention_size` tokens) and
    integrations/sdpa_attention.py (use_gqa_in_sdpa: only without a mask); ATen transformers/sdp_utils.cpp.
    """
    model, training = spec.model, spec.training
    s = training.sequence_length
    theirs = training.implementation == "huggingface" and training.attention == "flash" and spec.inference is None
    if not theirs or not model.sliding_window or s < model.sliding_window:
        return 0
    layers = sum(model.has_window(layer) for layer in range(model.num_layers))
    item = DTYPE_BYTES[training.dtype]
    mask = item * s * s
    repeated = 2 * item * training.micro_batch_size * s * (model.query_size - model.key_value_size)
    return (min(layers, 1) if training.recompute == "full" else layers) * (mask + repeated)
