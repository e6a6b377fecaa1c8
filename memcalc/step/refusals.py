"""What the step cannot run, said in one message."""

from __future__ import annotations

import torch.distributed as dist

from memcalc.errors import InputError
from memcalc.spec.spec import Spec

NO_KERNEL = "No available kernel"  # of torch, ATen native/transformers/attention.cpp


ENGINES = ("fsdp2", "ddp")  # PyTorch's own, which the step can run


def refuse_parallel(spec: Spec) -> None:
    """This loop is one rank: on its own, or of a process group that has as many as the spec."""
    for name in ("data_parallel", "tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"):
        count = getattr(spec.parallelism, name)
        if name == "data_parallel" and spec.parallelism.engine in ENGINES and _ranks_are_there(spec):
            continue
        if count > 1:
            raise InputError(
                f"{name} = {count}, but the step runs on one device.",
                f"Set {name}: 1, or use `memcalc estimate`, which knows sharding.",
                f"parallelism.{name}",
            )


def _ranks_are_there(spec: Spec) -> bool:
    """Whether this process is one of as many ranks as the spec asks for."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() == spec.parallelism.data_parallel


def no_kernel(spec: Spec) -> InputError:
    """What to say when scaled_dot_product_attention knows no kernel of the kind that it was held to."""
    training, model = spec.training, spec.model
    grouped = ", grouped keys" if model.num_key_value_heads < model.num_attention_heads else ""
    return InputError(
        f"PyTorch's attention = {training.attention} has no kernel for {training.dtype}, head_dim = {model.head_dim}"
        f"{grouped} on this device.",
        "Set training.attention: eager" + (", or flash with bf16 or fp16." if training.dtype == "fp32" else "."),
        "training.attention",
    )
