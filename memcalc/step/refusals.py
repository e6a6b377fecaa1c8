"""What the step cannot run, said in one message."""

from __future__ import annotations

import torch
import torch.distributed as dist

from memcalc.errors import InputError
from memcalc.spec.foreign import family_of_foreign
from memcalc.spec.spec import Spec
from memcalc.spec.splitting import unsplittable

NO_KERNEL = "No available kernel"  # of torch, ATen native/transformers/attention.cpp


ENGINES = ("fsdp2", "ddp")  # PyTorch's own, which the step can run


def engine_of(spec: Spec) -> str | None:
    """What spreads the step over ranks: an engine of the spec's, "dtensor" where layers alone are split; else None."""
    parallelism = spec.parallelism
    if parallelism.data_parallel > 1:
        return parallelism.engine
    return "dtensor" if parallelism.tensor_parallel > 1 else None


def refuse_parallel(spec: Spec) -> None:
    """This loop is one rank: on its own, or of a process group that has as many as the spec.

    Raises:
        InputError: it cannot be spread as the spec asks for, or the other ranks are missing.
    """
    refuse_split(spec)
    for name in ("data_parallel", "tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"):
        count = getattr(spec.parallelism, name)
        engine = name in ("data_parallel", "tensor_parallel") and spec.parallelism.engine in ENGINES
        if engine and _ranks_are_there(spec):
            continue
        if count > 1:
            raise InputError(
                f"{name} = {count}, but the step runs on one device.",
                f"Set {name}: 1, or use `memcalc estimate`, which knows sharding.",
                f"parallelism.{name}",
            )


def refuse_modules(spec: Spec) -> None:
    """What other programs' modules do, which the reference decoder does not.

    Raises:
        InputError: the run asks for it.
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
    }
    for field in (name for name, is_asked in asked.items() if is_asked):
        value = str(getattr(training, field)).lower()
        raise InputError(
            f"{field} = {value} is of another program's modules, which the step does not run.",
            f"Leave {field} out, use `memcalc estimate`, or dry-run the program itself.",
            f"training.{field}",
        )


def refuse_offload(spec: Spec, device: torch.device) -> None:
    """What is offloaded from the host to itself.

    Raises:
        InputError: the step runs on the CPU, and its parameters or activations are to be offloaded there.
    """
    if device.type != "cpu":
        return
    if spec.training.offload_activations != "none":
        raise InputError(
            f"offload_activations = {spec.training.offload_activations} on the CPU, where they already are.",
            "Set offload_activations: none, or run it on a device; trace has CUDA's semantics by default.",
            "training.offload_activations",
        )
    if spec.parallelism.weights_on_host:
        raise InputError(
            f"offload = {spec.parallelism.offload} on the CPU, where the step already is.",
            "Set offload: none, or run it on a device; trace has CUDA's semantics by default.",
            "parallelism.offload",
        )


def refuse_split(spec: Spec) -> None:
    """What PyTorch's DTensor, or our plan for it, cannot split over tensor-parallel ranks.

    Raises:
        InputError: of the first thing that it cannot.
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
    """Whether this process is one of as many ranks as the spec asks for."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() == spec.parallelism.ranks


def no_kernel(spec: Spec) -> InputError:
    """What to say when scaled_dot_product_attention knows no kernel of the kind that it was held to."""
    training, model = spec.training, spec.model
    if model.transformers_config is not None:  # it may be the head, a mask, or what else the family gives the kernel
        others = [kind for kind in ("memory-efficient", "eager") if kind != training.attention]
        return InputError(
            f"PyTorch's attention = {training.attention} has no kernel for what {family_of_foreign(model)} asks of it.",
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
    """What to say when an optimizer's operators are not those that DTensor can run on parts of tensors."""
    training = spec.training
    reason = " ".join(str(error).split()).partition(". ")[0].rstrip(".")
    return InputError(
        f"optimizer = {training.optimizer} ({training.optimizer_implementation}): PyTorch {torch.__version__} cannot "
        f"update parameters that are split over ranks with it: {reason}.",
        "Set another optimizer, such as adamw, or engine: ddp, which splits none.",
        "training.optimizer",
    )


def stopped(spec: Spec, error: Exception) -> InputError:
    """What to say when the code of a family that only transformers knows ends in an error of its own."""
    return InputError(
        f"transformers' code of {family_of_foreign(spec.model)} stops: {type(error).__name__}: "
        f"{' '.join(str(error).split()) or 'without a word'}",
        "Look into its config.json; what needs values cannot run on fake tensors, but may with --device null.",
        "model",
    )
