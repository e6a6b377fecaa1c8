"""The memory components: the names that ledgers, reports and events share."""

from __future__ import annotations

from enum import StrEnum


class Component(StrEnum):
    """The purpose of a tensor. Every byte that the PyTorch allocator allocates belongs to exactly one component."""

    WEIGHTS = "weights"  # parameters that forward reads, resident between steps (shards only, if sharded)
    MASTER_WEIGHTS = "master_weights"  # the fp32 copies that the optimizer updates
    GRADIENTS = "gradients"  # of parameters, all copies in every dtype
    OPTIMIZER_STATE = "optimizer_state"  # Adam's moments and other state that the optimizer keeps between steps
    ACTIVATIONS = "activations"  # saved for backward by the layers
    KV_CACHE = "kv_cache"  # generation only: keys and values of all tokens so far, in every layer
    LOGITS_AND_LOSS = "logits_and_loss"  # from the final norm's input to the loss, and its backward
    INPUTS = "inputs"  # token ids and labels
    TEMPORARIES = "temporaries"  # allocated and freed within one phase
    COMMUNICATION_BUFFERS = "communication_buffers"  # all-gathered parameters, prefetch and reduction buckets
    LIBRARY_WORKSPACE = "library_workspace"  # cuBLAS and other libraries that use the PyTorch allocator
    BLOCK_ROUNDING = "block_rounding"  # allocated minus requested bytes
