"""The small modules of the reference model: norms, dropout, and positions."""

from __future__ import annotations

from dataclasses import dataclass

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


def dropout(x: Tensor, rate: float, *, training: bool) -> Tensor:
    """Return the tensor with a fraction of its elements zeroed and the rest scaled; unchanged without dropout."""
    if not training or rate == 0.0:
        return x
    return torch.native_dropout(x, rate, True)[0]


ROPE_BASE = 10000.0  # Su et al., arXiv 2104.09864; the value changes no size


@dataclass(frozen=True, slots=True)
class Shared:
    """Tensors that all layers of one forward read, made once at its start."""

    mask: Tensor | None = None  # (s, s) bool, true where a query must not attend; used by eager attention only
    bias: Tensor | None = None  # (h, 1, s) ALiBi
    cos: Tensor | None = None  # (s, head_dim)
    sin: Tensor | None = None


def prepare(model: ModelSpec, attention: str, sequence_length: int, dtype: torch.dtype, device: torch.device) -> Shared:
    """Return the shared tensors of one forward, in the dtype of the layers."""
    mask = bias = cos = sin = None
    if attention == "eager":
        mask = torch.ones(sequence_length, sequence_length, dtype=torch.bool, device=device).triu(1)
    if model.position_embedding == "alibi":
        bias = alibi(model.num_attention_heads, sequence_length, device).to(dtype)
    if model.position_embedding == "rope":
        angles = rotary_angles(model.head_dim, sequence_length, device)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return Shared(mask, bias, cos, sin)


def rotary_angles(head_dim: int, sequence_length: int, device: torch.device) -> Tensor:
    """Return the (s, head_dim) rotation angles of each position and pair of features."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    positions = torch.arange(sequence_length, dtype=torch.float32, device=device)
    angles = torch.outer(positions, ROPE_BASE**-exponents)
    return torch.cat((angles, angles), dim=-1)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return heads (..., s, head_dim) with RoPE applied. Autograd saves cos and sin, not the heads."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


def alibi(num_heads: int, sequence_length: int, device: torch.device) -> Tensor:
    """Return the (h, 1, s) bias of Press et al. (arXiv 2108.12409), up to a constant per row that softmax ignores."""
    heads = torch.arange(1, num_heads + 1, dtype=torch.float32, device=device)
    slopes = torch.exp2(-8.0 * heads / num_heads)
    positions = torch.arange(sequence_length, dtype=torch.float32, device=device)
    return (slopes[:, None] * positions)[:, None, :]
