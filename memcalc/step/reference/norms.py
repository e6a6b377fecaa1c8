"""LayerNorm and RMSNorm, of the residual stream and of heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from memcalc.spec.model import ModelSpec


def norm(model: ModelSpec, width: int, *, weight: bool = True) -> nn.Module:
    """Return LayerNorm (weight and bias) or RMSNorm (weight), without parameters if the model's norms have none."""
    affine = weight and model.norm_weight
    if model.normalization == "rmsnorm":
        return nn.RMSNorm(width, elementwise_affine=affine)
    return nn.LayerNorm(width, elementwise_affine=affine, bias=model.norm_bias)


class HeadNorm(nn.Module):
    """A norm of `heads` concatenated query or key heads: (b, s, h·d_h) to (b, s, h, d_h)."""

    def __init__(self, model: ModelSpec, heads: int) -> None:
        super().__init__()
        self.width, self.head_dim = model.qk_norm_width, model.head_dim
        self.weight: nn.Parameter | None = None
        if self.width == "each-head":
            self.norm = norm(model, self.head_dim, weight=False)
            if model.norm_weight and model.qk_norm_weight:
                self.weight = nn.Parameter(torch.ones(heads * self.head_dim))
        else:
            one = self.width == "head"
            self.norm = norm(model, self.head_dim if one else heads * self.head_dim, weight=model.qk_norm_weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized heads, (b, s, h, d_h)."""
        if self.width == "all-heads":
            x = self.norm(x)
        heads = x.view(*x.shape[:-1], -1, self.head_dim)
        if self.width != "all-heads":
            heads = self.norm(heads)
        return heads if self.weight is None else heads * self.weight.view(-1, self.head_dim)
