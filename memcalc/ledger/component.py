"""The kinds of memory, named once and used everywhere."""

from __future__ import annotations

from enum import StrEnum


class Component(StrEnum):
    """What a tensor is for. Every byte that PyTorch's allocator hands out belongs to exactly one."""

    WEIGHTS = "weights"  # the resident copies that forward reads (shards only, when sharded)
    MASTER_WEIGHTS = "master_weights"  # the fp32 copies that the optimizer updates
    GRADIENTS = "gradients"  # of parameters, in every precision they are held in
    OPTIMIZER_STATE = "optimizer_state"  # moments and what else the update rule remembers
    ACTIVATIONS = "activations"  # what the layers save for backward
    KV_CACHE = "kv_cache"  # of generation: keys and values of the tokens so far, in every layer
    LOGITS_AND_LOSS = "logits_and_loss"  # from the final norm's input to the loss, and its backward
    INPUTS = "inputs"  # token ids and labels
    TEMPORARIES = "temporaries"  # made and freed inside one phase
    COMMUNICATION_BUFFERS = "communication_buffers"  # gathered shards, prefetch, buckets
    LIBRARY_WORKSPACE = "library_workspace"  # cuBLAS and the like, from the same allocator
    BLOCK_ROUNDING = "block_rounding"  # what the allocator adds to each request
