"""Losses that never materialize all logits, and Megatron-Core's loss over a sharded vocabulary, here of one rank."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from memcalc.errors import Unavailable
from memcalc.spec.training import TrainingSpec

Head = Callable[[], nn.Module]  # called when it is needed: PEFT may replace the module
Loss = Callable[[Tensor, Tensor], Tensor]


def tokenwise_loss(training: TrainingSpec, head: Head) -> Loss:
    """Return a loss from hidden states (b, s, d) and labels (b, s) to a scalar; it computes logits by chunks of tokens.

    Raises:
        Unavailable: Liger's kernel is not installed, or the loss is TRL's or axolotl's.
    """
    if training.loss == "chunked":
        return partial(chunked, head, training.loss_chunks)
    if training.loss == "tiled":
        raise Unavailable("loss = tiled runs TRL's Triton kernels: dry-run a program of TRL, or trace loss=chunked.")
    if training.loss == "gathered":
        raise Unavailable("loss = gathered is of pairs of sequences: dry-run a program of torchtune.")
    if training.loss == "selective":
        raise Unavailable("loss = selective runs a Triton kernel of axolotl or TRL: dry-run their program.")
    if importlib.util.find_spec("liger_kernel") is None:
        raise Unavailable("loss = fused needs Liger, which is not installed. Run: pip install liger-kernel")
    transformers: Any = importlib.import_module("liger_kernel.transformers")
    return partial(fused, head, transformers.LigerFusedLinearCrossEntropyLoss())


def chunked(head: Head, chunks: int, hidden: Tensor, labels: Tensor) -> Tensor:
    """Return the loss by checkpointed chunks: a chunk's logits exist only while it is computed and recomputed."""
    projection = head()

    def one(part: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(projection(part).float(), targets, reduction="sum")

    parts = zip(hidden.flatten(0, 1).chunk(chunks), labels.flatten().chunk(chunks), strict=True)
    losses = [checkpoint(one, part, targets, use_reentrant=False) for part, targets in parts]
    return torch.stack(losses).sum() / labels.numel()


def fused(head: Head, kernel: Callable[..., Tensor], hidden: Tensor, labels: Tensor) -> Tensor:
    """Return Liger's fused linear cross-entropy, which computes the gradients in forward."""
    return kernel(head().weight, hidden.flatten(0, 1), labels.flatten())


def vocab_parallel(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over all tokens."""
    losses: Tensor = VocabParallelCrossEntropy.apply(logits, labels)  # type: ignore[no-untyped-call]
    return losses.mean()


class VocabParallelCrossEntropy(torch.autograd.Function):
    """Megatron-Core's cross-entropy over a sharded vocabulary, without the reductions over ranks.

    Its fp32 copy of the logits becomes the softmax, which becomes its own gradient in place.
    Source: megatron/core/tensor_parallel/cross_entropy.py.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of every token, (b, s) in fp32."""
        shifted = logits.float()
        shifted -= shifted.max(dim=-1, keepdim=True).values
        outside = (labels < 0) | (labels >= logits.shape[-1])
        targets = labels.clone()
        targets[outside] = 0
        predicted = shifted.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        softmax = shifted.exp_()
        total = softmax.sum(dim=-1)
        softmax.div_(total.unsqueeze(-1))
        ctx.save_for_backward(softmax, outside, targets)
        return total.log() - predicted

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the logits, computed in place of the softmax."""
        softmax, outside, targets = ctx.saved_tensors
        rows = softmax.view(-1, softmax.shape[-1])
        rows[torch.arange(rows.shape[0], device=rows.device), targets.view(-1)] -= 1.0 - outside.view(-1).float()
        return softmax.mul_(gradients[0].unsqueeze(-1)), None
