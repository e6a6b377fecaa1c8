"""The weight layout of the modules that run, and the layers that DTensor shards."""

from __future__ import annotations

from memcalc.spec.model import ModelSpec
from memcalc.spec.recipes import RECIPES
from memcalc.spec.spec import Spec

# Families with layers that store their weights as (in, out): transformers 5.23 pytorch_utils.py, Conv1D.
TRANSPOSED = ("gpt2",)


def split_by_dtensor(spec: Spec) -> bool:
    """Return whether DTensor shards the layers (under PyTorch's own engines); else Megatron-LM's modules do."""
    parallelism = spec.parallelism
    own = spec.training.implementation in ("plain", "torchtitan") and parallelism.engine in ("ddp", "fsdp2")
    return own and spec.inference is None and parallelism.tensor_parallel > 1


def table_gradient_is_unsharded(spec: Spec) -> bool:
    """Return whether the embedding's `.grad` is unsharded on every rank, although its rows are sharded.

    torch 2.13 torch/distributed/tensor/_ops/_embedding_ops.py, embedding_dense_backward_strategy: if the output
    gradient and the indices are replicated, so is the weight gradient, and AccumulateGrad stores it unchanged. Only a
    sum with a tied LM head's gradient or with a main gradient, or FSDP2, when it reduces (_fsdp_param.py,
    _get_grad_inner_tensor), gives it the parameter's sharding.
    """
    parallelism = spec.parallelism
    tied = spec.model.tie_word_embeddings and parallelism.pipeline_parallel == 1
    stays = RECIPES[spec.training.recipe].gradients is not None
    sharded = parallelism.engine == "fsdp2" and parallelism.shards > 1 and not sums_unsharded(spec)
    return split_by_dtensor(spec) and stays and not tied and not sharded


def sums_unsharded(spec: Spec) -> bool:
    """Return whether the engine keeps unsharded gradients of several micro-batches, and reduces them after the last."""
    parallelism = spec.parallelism
    several = spec.training.gradient_accumulation_steps > 1 or parallelism.pipeline_parallel > 1
    return parallelism.reduces_once and several


def weight_layout(model: ModelSpec, implementation: str, tensor_parallel: int = 1, *, apart: bool = False) -> ModelSpec:
    """Return the model with the weight layout of the modules that run.

    Plain fuses q, k, v and keeps gate and up separate. Megatron-Core fuses both, and rounds the vocabulary up to a
    multiple of 128·t (Megatron-LM megatron/training/tokenizer: make_vocab_size_divisible_by). `apart`: whether plain
    keeps q, k and v separate where the checkpoint does.
    """
    changes: dict[str, object] = {}
    if implementation == "plain":
        own = apart or model.mla is not None
        changes = {"fused_qkv": model.fused_qkv if own else True, "fused_gate_up": False}
    elif implementation == "megatron":
        step = 128 * tensor_parallel
        changes = {"fused_qkv": True, "fused_gate_up": True, "vocab_size": -(-model.vocab_size // step) * step}
    differing = {key: value for key, value in changes.items() if getattr(model, key) != value}
    return model.model_copy(update=differing) if differing else model
