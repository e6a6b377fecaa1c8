"""Positions in the reference decoder's attention: RoPE cos/sin cache, ALiBi bias, causal mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from memcalc.spec.model import ModelSpec

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
