"""Errors for runs that the step does not support."""

from __future__ import annotations

import torch
import torch.distributed as dist

from memcalc.errors import InputError
from memcalc.spec.model_families.transformers_fallback import fallback_family
from memcalc.spec.spec import Spec
from memcalc.spec.untraced_features import unsplittable

NO_KERNEL = "No available kernel"  # PyTorch's message, ATen native/transformers/attention.cpp


ENGINES = ("fsdp1", "fsdp2", "ddp")  # PyTorch's engines, which the step can run


def engine_of(spec: Spec) -> str | None:
    """Return the engine that distributes the step: the spec's, "dtensor" if only layers are split; None on one rank."""
    parallelism = spec.parallelism
    if parallelism.data_parallel > 1:
        return parallelism.engine
    return "dtensor" if parallelism.tensor_parallel > 1 else None


def refuse_parallel(spec: Spec) -> None:
    """Check that the run has one rank, or that this process group has as many ranks as the spec.

    Raises:
        InputError: the step does not support the parallelism, or other ranks are missing.
    """
    refuse_split(spec)
    parallelism = spec.parallelism
    if parallelism.ranks == 1 and not parallelism.trains_alone:
        raise InputError(
            f"zero_stage = {parallelism.zero_stage} with engine = deepspeed, but the step runs without DeepSpeed.",
            "Set zero_stage: 0 and offload: none, or use `memcalc estimate`, or `memcalc dry-run` for your program.",
            "parallelism.zero_stage",
        )
    for name in ("data_parallel", "tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"):
        count = getattr(spec.parallelism, name)
        engine = name in ("data_parallel", "tensor_parallel") and spec.parallelism.engine in ENGINES
        if engine and _ranks_are_there(spec):
            continue
        if count > 1:
            raise InputError(
                f"{name} = {count}, but the step runs on one device.",
                f"Set {name}: 1, or use `memcalc estimate`, which supports sharding.",
                f"parallelism.{name}",
            )


def refuse_modules(spec: Spec) -> None:
    """Reject settings of other programs' modules that the reference decoder does not support.

    Raises:
        InputError: there is such a setting.
    """
    training = spec.training
    if spec.model.num_labels:
        raise InputError(
            f"num_labels = {spec.model.num_labels}, but the step trains models with an LM head.",
            "Use `memcalc estimate`, or dry-run the program itself.",
            "model.num_labels",
        )
    asked = {
        "norm_dtype": training.norm_dtype != "input",
        "repeat_kv": training.repeat_kv,
        "heads_first": training.heads_first,
        "loss_recompute": not training.loss_recompute,
        "fake_quantization": training.fake_quantization != "none",
    }
    if training.lora is not None and training.lora.implementation != "peft":
        raise InputError(
            "lora.implementation = litgpt needs LitGPT's modules, which the step does not run.",
            "Set lora.implementation: peft, use `memcalc estimate`, or dry-run the program itself.",
            "training.lora.implementation",
        )
    if training.lora is not None and training.lora.dora:
        raise InputError(
            "lora.dora = true needs torchtune's modules, which the step does not run.",
            "Set lora.dora: false, use `memcalc estimate`, or dry-run the program itself.",
            "training.lora.dora",
        )
    for field in (name for name, is_asked in asked.items() if is_asked):
        value = str(getattr(training, field)).lower()
        raise InputError(
            f"{field} = {value} needs another program's modules, which the step does not run.",
            f"Leave {field} out, use `memcalc estimate`, or dry-run the program itself.",
            f"training.{field}",
        )


def refuse_offload(spec: Spec, device: torch.device) -> None:
    """Reject offloading from the CPU to the CPU.

    Raises:
        InputError: the step runs on the CPU and offloads parameters or activations.
    """
    if device.type != "cpu":
        return
    if spec.training.offload_activations != "none":
        raise InputError(
            f"offload_activations = {spec.training.offload_activations} has no effect on the CPU, which already holds "
            "the activations.",
            "Set offload_activations: none, or run it on a device; trace has CUDA's semantics by default.",
            "training.offload_activations",
        )
    if spec.parallelism.weights_on_host:
        raise InputError(
            f"offload = {spec.parallelism.offload} has no effect: the step already runs on the CPU.",
            "Set offload: none, or run it on a device; trace has CUDA's semantics by default.",
            "parallelism.offload",
        )


def refuse_split(spec: Spec) -> None:
    """Reject models that PyTorch's DTensor, or memcalc's plan for it, cannot split over tensor-parallel ranks.

    Raises:
        InputError: with the first reason.
    """
    ranks = spec.parallelism.tensor_parallel
    found = unsplittable(spec) if ranks > 1 else None
    if found is not None:
        key, reason = found
        raise InputError(
            f"tensor_parallel = {ranks} cannot be run: {reason}.",
            "Set tensor_parallel: 1, or use `memcalc estimate`, which has formulas for it.",
            key,
        )


def _ranks_are_there(spec: Spec) -> bool:
    """Return whether this process belongs to a group of as many ranks as the spec has."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() == spec.parallelism.ranks


def no_kernel(spec: Spec) -> InputError:
    """Return the error for an attention kernel that scaled_dot_product_attention does not have."""
    training, model = spec.training, spec.model
    if model.transformers_config is not None:  # the cause may be the head size, a mask, or another argument
        others = [kind for kind in ("memory-efficient", "eager") if kind != training.attention]
        return InputError(
            f"PyTorch's attention = {training.attention} has no kernel for the attention of {fallback_family(model)}.",
            f"Set training.attention: {' or '.join(others)}.",
            "training.attention",
        )
    grouped = ", grouped keys" if model.num_key_value_heads < model.num_attention_heads else ""
    return InputError(
        f"PyTorch's attention = {training.attention} has no kernel for {training.dtype}, head_dim = {model.head_dim}"
        f"{grouped} on this device.",
        "Set training.attention: eager" + (", or flash with bf16 or fp16." if training.dtype == "fp32" else "."),
        "training.attention",
    )


def no_split_update(spec: Spec, error: Exception) -> InputError:
    """Return the error for an optimizer with operators that DTensor cannot run on sharded tensors."""
    training = spec.training
    reason = " ".join(str(error).split()).partition(". ")[0].rstrip(".")
    return InputError(
        f"optimizer = {training.optimizer} ({training.optimizer_implementation}): PyTorch {torch.__version__} cannot "
        f"update parameters that are split over ranks with it: {reason}.",
        "Set another optimizer, such as adamw, or engine: ddp, which splits none.",
        "training.optimizer",
    )


def stopped(spec: Spec, error: Exception) -> InputError:
    """Return the error for a failure in the own code of a family without formulas."""
    return InputError(
        f"transformers' code of {fallback_family(spec.model)} stops: {type(error).__name__}: "
        f"{' '.join(str(error).split()) or 'without a word'}",
        "Check the config.json. Code that reads tensor values fails on fake tensors, but may run with --device null.",
        "model",
    )
