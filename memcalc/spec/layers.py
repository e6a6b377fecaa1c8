"""Layers of a model that differ in a run: experts in place of an MLP, a masked window, no RoPE."""

from __future__ import annotations

from itertools import islice
from math import lcm

from memcalc.spec.model import ModelSpec
from memcalc.spec.spec import Spec
from memcalc.spec.towers import makes_masks

# Frameworks with such collators, and scripts on Accelerate, most of which take transformers' collators.
PASS_MASKS = ("trainer", "sft", "dpo", "kto", "orpo", "reward", "grpo", "ppo", "accelerate", "llama-factory")


def has_mask(spec: Spec, layer: int) -> bool:
    """Return whether a layer, counted from 0, attends under a mask: of padded sequences, or of its window."""
    return has_padding_mask(spec) or (fills_windows(spec) and spec.model.has_window(layer))


def has_padding_mask(spec: Spec) -> bool:
    """Return whether all layers attend under a mask of sequences: padded ones, or ones with images (`masks_images`).

    Eager attention always has a mask.
    """
    training = spec.training
    if (
        (training.padding_mask == "none" and not masks_images(spec.model))
        or training.implementation != "huggingface"
        or spec.inference is not None
    ):
        return False
    return training.attention != "eager"


def passes_mask(spec: Spec) -> bool:
    """Return whether the program passes a mask of the tokens of each sequence to the model, even if none is padding.

    The collators of transformers and of TRL do (data/data_collator.py, pad_without_fast_tokenizer_warning; TRL 1.16
    trainer/sft_trainer.py, DataCollatorForLanguageModeling), unless batches are one row without padding. Full causal
    attention ignores a mask of ones; windows combine it with their own (masking_utils.py since 4.53).
    """
    training = spec.training
    if training.implementation != "huggingface" or spec.inference is not None or training.padding_free:
        return False
    return training.padding_mask == "boolean" or training.framework in PASS_MASKS


def masks_images(model: ModelSpec) -> bool:
    """Return whether a vision-language model's own masks replace causal attention without a mask."""
    return model.vision_config is not None and makes_masks(model.vision_config)


def fills_windows(spec: Spec) -> bool:
    """Return whether the sequence fills masked windows, so that layers with a window use another kernel."""
    return 0 < masked_from(spec) <= spec.training.row_length


def masked_from(spec: Spec) -> int:
    """Return the length of the shortest sequence that fills masked windows; 0: none does.

    A window that is longer than the sequence masks nothing (transformers 5.23 masking_utils.py,
    _ignore_causal_mask_sdpa). Eager attention always has a mask.
    """
    training = spec.training
    if spec.inference is not None or training.attention == "eager" or training.attention_windows != "mask":
        return 0
    return spec.model.sliding_window


def windows_among(model: ModelSpec, every: int = 1) -> tuple[bool, bool]:
    """Return whether among every n-th layer there is one with a window, and one without."""
    interval, named = model.full_attention_interval, model.full_attention_layers
    # Of two consecutive layers at most one matches the interval, unless all do.
    first = islice(range(every - 1, model.num_layers, every), 2 * (len(named) + 1))
    whole = every <= model.num_layers and not model.sliding_window
    whole = whole or any(layer < model.num_layers and (layer + 1) % every == 0 for layer in named)
    return any(map(model.has_window, first)), whole or 0 < lcm(every, interval) <= model.num_layers


def applies_no_rope(spec: Spec, layer: int) -> bool:
    """Return whether a layer, counted from 0, of transformers' modules applies no RoPE."""
    return _rotation_counts(spec) and not spec.model.rotates(layer)


def _rotation_counts(spec: Spec) -> bool:
    """Return whether layers without RoPE are distinguished: plain modules apply it in every layer."""
    return spec.training.implementation == "huggingface" and spec.inference is None


def differ_in_rotation(spec: Spec) -> bool:
    """Return whether some layers apply RoPE and others do not."""
    model = spec.model
    by_windows = model.rotates_windows_alone and model.sliding_window > 0
    named = model.unrotated_interval > 1 or bool(model.unrotated_layers)
    full = bool(model.full_attention_interval or model.full_attention_layers)
    return _rotation_counts(spec) and (named or (by_windows and full))


def differ_in_masks(spec: Spec) -> bool:
    """Return whether some layers attend under the mask of their window and others do not."""
    model = spec.model
    windows = fills_windows(spec) and not has_padding_mask(spec)
    return windows and bool(model.full_attention_interval or model.full_attention_layers)


def are_mixed(spec: Spec) -> bool:
    """Return whether layers of different types alternate, so that each must be considered separately."""
    model = spec.model
    return model.mixes_experts or differ_in_masks(spec) or differ_in_rotation(spec) or differ_in_attention(model)


def differ_in_attention(model: ModelSpec) -> bool:
    """Return whether only some layers have linear attention, or the heads of `full_attention`."""
    layers = model.num_layers
    return 0 < model.linear_layers(0, layers) < layers or 0 < model.layers_with_full_heads(0, layers) < layers
