"""The kinds of runs that errors are told apart by, from the narrowest to the widest."""

from __future__ import annotations

from memcalc.spec.spec import Spec

ONE_GPU, SEVERAL_GPUS, GENERATION = "one GPU", "several GPUs", "generation"
EXPANDABLE, SETTINGS = "one GPU, expandable segments", "one GPU, allocator settings"
_MODULES = {"huggingface": "transformers modules"}
_ENGINES = {"ddp": "DDP", "fsdp1": "FSDP1", "fsdp2": "FSDP2", "megatron": "Megatron-Core"}


def kinds_of(spec: Spec) -> tuple[str, ...]:
    """The kinds that a run belongs to; the errors of the first that was recorded often enough are the run's.

    Settings of the allocator are a kind of their own: runs under the default settings say nothing about them.
    """
    training, parallelism = spec.training, spec.parallelism
    if spec.inference is not None:
        return (GENERATION,)
    if parallelism.ranks == 1:
        if training.alloc_conf:
            return (EXPANDABLE,) if "expandable_segments:True" in training.alloc_conf else (SETTINGS,)
        if training.offload_activations != "none":
            return f"{ONE_GPU}, offloaded activations", ONE_GPU
        if training.finetune != "full":
            return f"{ONE_GPU}, {'QLoRA' if training.finetune == 'qlora' else 'LoRA'}", ONE_GPU
        return f"{ONE_GPU}, {_MODULES.get(training.implementation, f'{training.implementation} modules')}", ONE_GPU
    if training.implementation == "megatron" or parallelism.engine == "megatron":
        return "Megatron-Core", SEVERAL_GPUS
    if parallelism.offload != "none":
        return "offload to the host", SEVERAL_GPUS
    if parallelism.engine == "deepspeed":
        return f"DeepSpeed stage {parallelism.zero_stage}", "DeepSpeed", SEVERAL_GPUS
    if parallelism.tensor_parallel > 1:
        return "tensor parallelism", SEVERAL_GPUS
    return _ENGINES.get(parallelism.engine, parallelism.engine), SEVERAL_GPUS
