"""Which of a model's layers differ in a run: experts in place of an MLP, or a window that a mask keeps."""

from __future__ import annotations

from memcalc.spec.spec import Spec


def has_mask(spec: Spec, layer: int) -> bool:
    """Whether a layer, counted from 0, attends under the mask of its window."""
    return fills_windows(spec) and spec.model.has_window(layer)


def fills_windows(spec: Spec) -> bool:
    """Whether a sequence fills windows that a mask keeps, so that layers with a window take another kernel."""
    return 0 < masked_from(spec) <= spec.training.sequence_length


def masked_from(spec: Spec) -> int:
    """The shortest sequence that fills windows which a mask keeps; 0: none does.

    A window that is longer than the sequence hides nothing (transformers 5.23 masking_utils.py,
    _ignore_causal_mask_sdpa). Eager attention has a mask in any case.
    """
    training = spec.training
    if spec.inference is not None or training.attention == "eager" or training.attention_windows != "mask":
        return 0
    return spec.model.sliding_window


def are_mixed(spec: Spec) -> bool:
    """Whether layers of different kinds take turns, so that each has to be looked at."""
    model = spec.model
    if model.moe is not None and model.moe.mixed:
        return True
    return fills_windows(spec) and bool(model.full_attention_interval or model.full_attention_layers)
