"""Defaults of fields that a configuration omits, derived from the given ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from memcalc.errors import InputError
from memcalc.spec.finetuning import default_finetuning
from memcalc.spec.fsdp import computes_in, default_policy
from memcalc.spec.model_families.conversion import attends_eagerly, fused_attention
from memcalc.spec.model_families.transformers_fallback import attends_eagerly_alone
from memcalc.spec.optimizers import default_optimizer
from memcalc.spec.programs import GROUPED_HEADS, is_release, number
from memcalc.spec.recipes import ALIASES

DEFAULT_SEQUENCE_LENGTH = 2048
NOTHING: Mapping[str, Any] = MappingProxyType({})

# Megatron-LM megatron/training/arguments.py: its defaults with --bf16.
MEGATRON = {"recipe": "mixed-18", "optimizer_implementation": "fused", "loss": "vocab-parallel"}
MEGATRON_IN_FP32 = {"recipe": "fp32-main", "attention": "eager"}  # neither --bf16 nor --fp16; fused kernels lack fp32

SDPA = "sdpa"  # transformers' word for the fused kernel that PyTorch picks
ENGINE_OF_STAGE = {0: "ddp", 1: "deepspeed", 2: "deepspeed", 3: "fsdp2"}
# DeepSpeed's pipeline engine has no schedule but 1F1B (0.19.8 runtime/pipe/engine.py, TrainSchedule). Megatron-LM has
# interleaved stages, and a fork of it zero-bubble schedules (sail-sg/zero-bubble-pipeline-parallelism).
ENGINE_OF_STAGE_IN_OTHER_SCHEDULES = ENGINE_OF_STAGE | {1: "megatron", 2: "fsdp2"}


def default_training(
    training: dict[str, Any], model: dict[str, Any], parallelism: Mapping[str, Any] = NOTHING
) -> dict[str, Any]:
    """Return the training block with its derived defaults; validation rejects values of a wrong type."""
    filled = dict(training)
    if parallelism.get("offload") == "all":  # torch.optim uses foreach by default on GPUs only
        filled.setdefault("optimizer_implementation", "for-loop")
    positions = model.get("max_position_embeddings", DEFAULT_SEQUENCE_LENGTH)
    if isinstance(positions, int):
        filled.setdefault("sequence_length", min(DEFAULT_SEQUENCE_LENGTH, positions))
    _default_implementation(filled, model, engine_of(parallelism))
    release = filled.get("torch_version")
    if isinstance(release, str) and release[:1].isdigit():  # "2.10" in quotes; without quotes YAML reads 2.1
        filled["torch_version"] = f"v{release}"
    policy = computes_in(parallelism)
    if isinstance(policy, str):  # fp32 shards, with any compute dtype
        filled.setdefault("dtype", policy)
        filled.setdefault("recipe", "fp32")
    _default_attention(filled, model)
    # Their loops free the output before backward: schedules.py's forward_step, torchtitan's `del pred`.
    alone = parallelism.get("pipeline_parallel", 1) == 1
    lets_go = filled.get("implementation") == "megatron" or filled.get("framework") == "lightning"
    lets_go = lets_go or (filled.get("implementation") == "torchtitan" and alone)
    own = "step" if filled.get("framework") == "loop" and alone else "backward"  # `logits, loss = model(X, Y)`
    filled.setdefault("logits_until", "loss" if lets_go else own)
    _default_loop(filled)
    filled.setdefault("attention_windows", "mask" if filled.get("implementation") == "huggingface" else "kernel")
    if isinstance(filled.get("recipe"), str):
        filled["recipe"] = ALIASES.get(filled["recipe"], filled["recipe"])
    # fp32 is a dtype and a recipe: each implies the other.
    if filled.get("dtype") == "fp32":
        filled.setdefault("recipe", "fp32")
    if filled.get("recipe") == "fp32":
        filled.setdefault("dtype", "fp32")
    return default_finetuning(default_optimizer(filled))


def _default_implementation(training: dict[str, Any], model: dict[str, Any], engine: str) -> None:
    """Set the default modules, and those of their fields that differ from plain modules'."""
    if model.get("transformers_config") is not None:
        training.setdefault("implementation", "huggingface")  # only transformers supports the family
    if engine == "megatron":
        training.setdefault("implementation", "megatron")  # its loop trains its own modules
    implementation = training.get("implementation")
    if implementation == "megatron":
        for field, value in (MEGATRON | (MEGATRON_IN_FP32 if training.get("dtype") == "fp32" else {})).items():
            training.setdefault(field, value)
    elif engine == "megatron":
        training.setdefault("recipe", "mixed-18")  # the engine's own main gradients
    elif implementation == "torchtitan" and training.get("dtype") != "fp32":
        training.setdefault("recipe", "amp")  # fp32 weights, computed in bf16 or fp16


def _default_loop(training: dict[str, Any]) -> None:
    """Set the defaults of the framework's training loop.

    Lightning 2.6 loops/optimization/automatic.py, Closure.closure: training_step, then zero_grad, then backward; the
    step returns the loss only. nanoGPT (train.py, model.py): F.cross_entropy of the logits in the LM head's dtype.
    """
    framework = training.get("framework")
    training.setdefault("zero_grad_before", "backward" if framework == "lightning" else "forward")
    own = framework == "loop" and training.get("implementation", "plain") == "plain"
    training.setdefault("loss_upcast", not (own and training.get("loss", "materialized") == "materialized"))


def _default_attention(training: dict[str, Any], model: dict[str, Any]) -> None:
    """Set the default attention kernel.

    Some families support eager attention only, and some pass what only the memory-efficient kernel supports, or no
    fused one. In fp32 scaled_dot_product_attention falls back to its memory-efficient kernel, because flash supports
    16-bit dtypes only. If transformers passes grouped heads (enable_gqa), it falls back to the math kernel, because the
    memory-efficient one does not support them (torch 2.13 ATen sdp_utils.cpp; transformers 5.23
    integrations/sdpa_attention.py, use_gqa_in_sdpa). Falcon-7B's math kernel is counted as eager attention.

    `attention: sdpa` is this default. A family with eager attention only rejects sdpa, as transformers does.
    """
    implementation = training.get("implementation")
    published = model.get("transformers_config")
    if isinstance(published, str) and "attention" not in training and attends_eagerly_alone(published):
        training["attention"] = "eager"
    if training.get("attention") == SDPA:
        del training["attention"]
        if attends_eagerly(model.get("architecture"), implementation):
            training["attention"] = "flash"
    if attends_eagerly(model.get("architecture"), implementation):
        training.setdefault("attention", "eager")
    if implementation == "huggingface" and (kernel := fused_attention(model.get("architecture"))) != "flash":
        sizes = (model.get("num_key_value_heads"), model.get("norms_per_layer"))
        training.setdefault("attention", "eager" if takes_math_kernel(model.get("architecture"), *sizes) else kernel)
    wide = training.get("dtype", training.get("recipe")) == "fp32"
    if not wide or implementation == "megatron":
        return
    if implementation == "torchtitan":  # torchtitan 0.2.2 models/attention.py, sdpa_backends: cuDNN's, flash, math
        training.setdefault("attention", "math")
        return
    grouped = model.get("num_key_value_heads") != model.get("num_attention_heads")
    versions = training.get("versions")
    release = versions.get("transformers") if isinstance(versions, dict) else None
    theirs = implementation == "huggingface" and training.get("padding_mask", "none") == "none"
    training.setdefault("attention", kernel_in_fp32(release, grouped=grouped) if theirs else "memory-efficient")


def kernel_in_fp32(release: object, *, grouped: bool) -> str:
    """Return the kernel of transformers' modules in fp32 without a mask; an unknown release passes grouped heads."""
    known = isinstance(release, str) and is_release(release)
    repeats = known and number(str(release)) < number(GROUPED_HEADS)
    return "math" if grouped and not repeats else "memory-efficient"


def takes_math_kernel(architecture: object, key_heads: object, norms_per_layer: object) -> bool:
    """Return whether scaled_dot_product_attention has no fused kernel for a model: Falcon-7B's.

    Its one key head is passed for all queries without enable_gqa; decoders with two norms in a layer expand it
    (transformers 5.23 models/falcon/modeling_falcon.py, _split_heads).
    """
    return architecture == "falcon" and key_heads == 1 and norms_per_layer != 2


def default_parallelism(parallelism: dict[str, Any], implementation: object, dtype: object = None) -> dict[str, Any]:
    """Return the parallelism block with its derived engine, by ZeRO stage and schedule; megatron for Megatron.

    Args:
        parallelism: the block.
        implementation: `training.implementation`.
        dtype: `training.dtype`.
    """
    filled = dict(parallelism)
    model_parallel = any(filled.get(f"{kind}_parallel", 1) != 1 for kind in ("tensor", "pipeline", "context", "expert"))
    if implementation == "megatron" and (model_parallel or filled.get("zero_stage") == 1):
        filled.setdefault("engine", "megatron")
    if implementation == "torchtitan" and "engine" not in filled and filled.get("data_parallel", 1) != 1:
        filled.setdefault("zero_stage", 3)
    filled.setdefault("engine", engine_of(filled))
    if implementation == "torchtitan" and filled["engine"] == "fsdp2":
        filled.setdefault("zero_stage", 3)
        filled["fsdp"] = default_policy(filled.get("fsdp", {}), dtype)
    if filled.get("offload", "none") != "none":
        filled.setdefault("offload_pin_memory", filled["engine"] == "fsdp2")  # DeepSpeed's default is pin_memory: false
    return filled


def engine_of(parallelism: Mapping[str, Any]) -> str:
    """Return the engine of a parallelism block: the given one, or that of its ZeRO stage and schedule."""
    stage = parallelism.get("zero_stage", 0)
    engines = engines_of_stages(str(parallelism.get("schedule", "1f1b")))
    return str(parallelism.get("engine") or (engines.get(stage) if isinstance(stage, int) else None) or "ddp")


def engines_of_stages(schedule: str) -> dict[int, str]:
    """Return the default engine of each ZeRO stage, for a pipeline schedule."""
    return ENGINE_OF_STAGE if schedule == "1f1b" else ENGINE_OF_STAGE_IN_OTHER_SCHEDULES


def split_gpus(parallelism: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the parallelism block with data_parallel derived from the total number of GPUs (`gpus`).

    Raises:
        InputError: the number is not positive, is not a multiple of the other parallel sizes, or contradicts
            data_parallel.
    """
    if "gpus" not in parallelism:
        return parallelism
    filled = dict(parallelism)
    gpus = filled.pop("gpus")
    if type(gpus) is not int or gpus < 1:
        raise InputError(
            f"gpus = {str(gpus)[:60]} is not a positive whole number.", "Write digits only, such as 8.", where
        )
    others = [filled.get(f"{kind}_parallel", 1) for kind in ("tensor", "pipeline", "context")]
    if not all(type(size) is int and size > 0 for size in others):  # validation rejects them
        return filled
    ranks = math.prod(others)
    replicas = filled.setdefault("data_parallel", max(gpus // ranks, 1))
    if type(replicas) is int and replicas * ranks != gpus:
        sizes = "tensor_parallel {} x pipeline_parallel {} x context_parallel {}".format(*others)
        raise InputError(
            f"gpus = {gpus} differs from data_parallel {replicas} x {sizes} = {replicas * ranks}.",
            f"Set gpus to a multiple of {ranks}, or change these sizes."
            if ranks > 1
            else "Leave gpus or data_parallel out.",
            where,
        )
    return filled


def without_gpus(parallelism: dict[str, Any]) -> dict[str, Any]:
    """Return the parallelism block without the total number of GPUs, which `split_gpus` could not divide."""
    return {field: value for field, value in parallelism.items() if field != "gpus"}


def tie_batch(training: dict[str, Any], parallelism: dict[str, Any], where: str) -> dict[str, Any]:
    """Solve global_batch_size = micro_batch_size * gradient_accumulation_steps * data_parallel for omitted fields.

    Raises:
        InputError: the batch is not divisible, or all fields are given and inconsistent.
    """
    total = training.get("global_batch_size")
    replicas = parallelism.get("data_parallel", 1)
    micro = training.get("micro_batch_size")
    steps = training.get("gradient_accumulation_steps")
    given = [value for value in (total, replicas, micro, steps) if value is not None]
    if total is None or not all(type(value) is int and value > 0 for value in given):
        return training
    filled = dict(training)
    if steps is not None and micro is not None:
        if micro * steps * replicas != total:
            raise InputError(
                f"global_batch_size = {total} differs from micro_batch_size {micro} x gradient_accumulation_steps "
                f"{steps} x data_parallel {replicas} = {micro * steps * replicas}.",
                "Change one of these, or leave one out: memcalc computes the fourth.",
                where,
            )
        return filled
    known, size = ("micro_batch_size", micro or 1) if steps is None else ("gradient_accumulation_steps", steps)
    if total % (size * replicas):
        raise InputError(
            f"global_batch_size = {total} is not a multiple of {known} {size} x data_parallel {replicas} = "
            f"{size * replicas}.",
            f"Set a multiple of {size * replicas}, or change these.",
            where,
        )
    filled["gradient_accumulation_steps" if steps is None else "micro_batch_size"] = total // (size * replicas)
    return filled
