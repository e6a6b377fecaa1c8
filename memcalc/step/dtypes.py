"""The spec's dtype words as torch dtypes."""

from __future__ import annotations

import torch

from memcalc.spec.training import TrainingSpec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def compute_dtype(training: TrainingSpec) -> torch.dtype:
    """What forward and backward compute in."""
    return DTYPES[training.dtype]


def weight_dtype(training: TrainingSpec) -> torch.dtype:
    """What the weights that forward reads are held in: under autocast they stay in fp32, unless they are frozen."""
    in_16_bits = DTYPES[training.weight_dtype or training.dtype]
    if training.lora is not None:
        return torch.float32 if training.lora.base_dtype == "fp32" else in_16_bits
    return torch.float32 if training.recipe in ("fp32", "amp") else in_16_bits
