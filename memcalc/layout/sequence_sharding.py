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
