"""The two normalisations."""

from __future__ import annotations

from torch import nn

from memcalc.spec.model import ModelSpec


def norm(model: ModelSpec, width: int) -> nn.Module:
    """LayerNorm (weight and bias) or RMSNorm (weight)."""
    return nn.LayerNorm(width) if model.normalization == "layernorm" else nn.RMSNorm(width)
