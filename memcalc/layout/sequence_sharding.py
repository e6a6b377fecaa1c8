"""Which attention the ranks of context parallelism run."""

from __future__ import annotations

from memcalc.spec.spec import Spec


def has_ring_attention(spec: Spec) -> bool:
    """Return whether PyTorch's ring attention runs, as under Accelerate and torchtitan; Megatron's modules have TE's.

    Not modelled with latent attention.

    torch 2.13 distributed/tensor/experimental/_context_parallel/_attention.py (context_parallel).
    """
    parallelism = spec.parallelism
    asked = parallelism.context_parallel > 1 and parallelism.context_parallel_method != "all-to-all"
    return asked and spec.training.implementation != "megatron" and spec.model.mla is None


def rank_with_most(ranks: int) -> int:
    """Return the rank of a ring with the largest buffers, of at least 2 ranks.

    The last one has no partial block of attention, so its output needs no copy in the order of tokens. The one before
    has blocks of all queries, as far as there are three ranks, and a partial one (workspaces/ring_attention.py).
    """
    return ranks - 2
