"""Torch dtypes of the spec's dtype names."""

from __future__ import annotations

import torch

from memcalc.spec.training import TrainingSpec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def compute_dtype(training: TrainingSpec) -> torch.dtype:
    """Return the dtype of forward and backward."""
    return DTYPES[training.dtype]


def weight_dtype(training: TrainingSpec) -> torch.dtype:
    """Return the dtype of the weights that forward reads: fp32 under autocast, except frozen weights."""
    in_16_bits = DTYPES[training.weight_dtype or training.dtype]
    if training.lora is not None:
        return torch.float32 if training.lora.base_dtype == "fp32" else in_16_bits
    return torch.float32 if training.recipe in ("fp32", "amp") else in_16_bits
