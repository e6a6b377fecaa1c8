"""Attention of the reference decoder: one fused projection, then eager operators or PyTorch's fused kernels.

Eager attention saves for backward exactly what Korthikanti et al. (arXiv 2205.05198) count: 11bsd + 5bs^2h bytes.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from memcalc.spec.model import ModelSpec
from memcalc.spec.training import TrainingSpec
from memcalc.step.reference.dropout import dropout
from memcalc.step.reference.norms import HeadNorm
from memcalc.step.reference.positions import Shared, rotate

CUDA_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
CPU_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]  # the CPU's fused kernel does not support dropout


class Attention(nn.Module):
    """Fused QKV projection, causal attention, and the output projection."""

    def __init__(self, model: ModelSpec, training: TrainingSpec, dropout: float) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = model.num_attention_heads, model.num_key_value_heads, model.head_dim
        self.widths: tuple[int, ...] = (model.query_size, model.key_value_size, model.key_value_size)
        self.kernel = training.attention
        self.selective = training.recompute == "selective"
        self.dropout = dropout
        # Adapters need the separate weight matrices of the checkpoint; without adapters q, k and v are fused.
        self.fused = model.fused_qkv or training.lora is None
        if self.fused:
            self.qkv_proj = nn.Linear(model.hidden_size, sum(self.widths), bias=model.qkv_bias)
        else:
            self.q_proj, self.k_proj, self.v_proj = (
                nn.Linear(model.hidden_size, width, bias=model.qkv_bias) for width in self.widths
            )
        self.q_norm = HeadNorm(model, self.heads) if model.qk_norm else None
        self.k_norm = HeadNorm(model, self.kv_heads) if model.qk_norm else None
        self.o_proj = nn.Linear(model.query_size, model.hidden_size, bias=model.output_bias)

    def shard_heads(self, ranks: int) -> None:
        """Adapt to tensor parallelism: this rank has 1/ranks of the heads of q, k and v."""
        self.heads, self.kv_heads = self.heads // ranks, self.kv_heads // ranks
        self.widths = tuple(width // ranks for width in self.widths)

    def forward(self, x: Tensor, shared: Shared) -> Tensor:
        """Return the attention output: (b, s, d) to (b, s, d)."""
        batch, length, _ = x.shape
        q, k, v = self.project(x, shared)
        core = partial(self.eager, shared) if self.kernel == "eager" else self.kernel_attention
        attended: Tensor = checkpoint(core, q, k, v, use_reentrant=False) if self.selective else core(q, k, v)
        return self.o_proj(attended.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]

    def project(self, x: Tensor, shared: Shared) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (b, h, s, head_dim), keys and values (b, kv, s, head_dim):

        views of the fused output or rotated.
        """
        if self.fused:
            q, k, v = self.qkv_proj(x).split(self.widths, dim=-1)
        else:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        v = v.unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        else:
            q, k = q.unflatten(-1, (-1, self.head_dim)), k.unflatten(-1, (-1, self.head_dim))
            if shared.cos is not None and self.fused:
                # RoPE copies q and k; a view as v would keep their unrotated versions live until backward.
                v = v.contiguous()
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if shared.cos is not None and shared.sin is not None:
            q, k = rotate(q, shared.cos, shared.sin), rotate(k, shared.cos, shared.sin)
        return q, k, v

    def eager(self, shared: Shared, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return attention computed by separate operators, in the dtype of the queries."""
        k, v = self.expand(k), self.expand(v)
        scores = q @ k.transpose(-2, -1)
        scores = scores * self.head_dim**-0.5
        if shared.bias is not None:
            scores = scores + shared.bias
        assert shared.mask is not None
        scores = scores.masked_fill(shared.mask, -torch.inf)
        probabilities = functional.softmax(scores, dim=-1)
        return dropout(probabilities, self.dropout, training=self.training) @ v

    def kernel_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return attention by one kernel, which saves its inputs, its output and a log-sum-exp per query."""
        rate = self.dropout if self.training else 0.0
        backends = [CUDA_BACKENDS[self.kernel]] if q.is_cuda else CPU_BACKENDS
        grouped = self.kernel == "flash" and self.kv_heads != self.heads
        if not grouped:
            k, v = self.expand(k), self.expand(v)
        with sdpa_kernel(backends):
            return functional.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True, enable_gqa=grouped)

    def expand(self, heads: Tensor) -> Tensor:
        """Return the key/value heads, each repeated for the query heads that share it."""
        repeats = self.heads // self.kv_heads
        return heads if repeats == 1 else heads.repeat_interleave(repeats, dim=1)
