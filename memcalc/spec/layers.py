"""Which of a model's layers differ in a run: experts in place of an MLP, a window that a mask keeps, no rotation."""

from __future__ import annotations

from itertools import islice
from math import lcm

from memcalc.spec.model import ModelSpec
from memcalc.spec.spec import Spec


def has_mask(spec: Spec, layer: int) -> bool:
    """Whether a layer, counted from 0, attends under a mask: of padded sequences, or of its window."""
    return has_padding_mask(spec) or (fills_windows(spec) and spec.model.has_window(layer))


def has_padding_mask(spec: Spec) -> bool:
    """Whether all layers attend under the mask of padded sequences. Eager attention has a mask in any case."""
    training = spec.training
    if training.padding_mask == "none" or training.implementation != "huggingface" or spec.inference is not None:
        return False
    return training.attention != "eager"


def fills_windows(spec: Spec) -> bool:
    """Whether a sequence fills windows that a mask keeps, so that layers with a window take another kernel."""
    return 0 < masked_from(spec) <= spec.training.row_length


def masked_from(spec: Spec) -> int:
    """The shortest sequence that fills windows which a mask keeps; 0: none does.

    A window that is longer than the sequence hides nothing (transformers 5.23 masking_utils.py,
    _ignore_causal_mask_sdpa). Eager attention has a mask in any case.
    """
    training = spec.training
    if spec.inference is not None or training.attention == "eager" or training.attention_windows != "mask":
        return 0
    return spec.model.sliding_window


def windows_among(model: ModelSpec, every: int = 1) -> tuple[bool, bool]:
    """Whether of each n-th layer one has a window, and one has none."""
    interval, named = model.full_attention_interval, model.full_attention_layers
    # Of two in a row at most one is of the interval, unless all are.
    first = islice(range(every - 1, model.num_layers, every), 2 * (len(named) + 1))
    whole = every <= model.num_layers and not model.sliding_window
    whole = whole or any(layer < model.num_layers and (layer + 1) % every == 0 for layer in named)
    return any(map(model.has_window, first)), whole or 0 < lcm(every, interval) <= model.num_layers


def turns_nothing(spec: Spec, layer: int) -> bool:
    """Whether a layer, counted from 0, of transformers' modules leaves its queries and keys as they are."""
    return _rotation_counts(spec) and not spec.model.rotates(layer)


def _rotation_counts(spec: Spec) -> bool:
    """Whether layers that turn nothing are told from others: plain modules turn all that they project."""
    return spec.training.implementation == "huggingface" and spec.inference is None


def differ_in_rotation(spec: Spec) -> bool:
    """Whether some layers turn queries and keys and others do not."""
    model = spec.model
    by_windows = model.rotates_windows_alone and model.sliding_window > 0
    named = model.unrotated_interval > 1 or bool(model.unrotated_layers)
    full = bool(model.full_attention_interval or model.full_attention_layers)
    return _rotation_counts(spec) and (named or (by_windows and full))


def differ_in_masks(spec: Spec) -> bool:
    """Whether some layers attend under the mask of their window and others do not."""
    model = spec.model
    windows = fills_windows(spec) and not has_padding_mask(spec)
    return windows and bool(model.full_attention_interval or model.full_attention_layers)


def are_mixed(spec: Spec) -> bool:
    """Whether layers of different kinds take turns, so that each has to be looked at."""
    model = spec.model
    if model.moe is not None and model.moe.mixed:
        return True
    return differ_in_masks(spec) or differ_in_rotation(spec)
