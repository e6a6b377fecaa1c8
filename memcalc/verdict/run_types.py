"""The kinds of runs with separate error statistics, from the narrowest to the widest."""

from __future__ import annotations

from memcalc.sharding.schedules import lacks
from memcalc.spec.spec import Spec
from memcalc.spec.training import TrainingSpec

ONE_GPU, SEVERAL_GPUS, GENERATION = "one GPU", "several GPUs", "generation"
FP8 = "FP8"
PROGRAMS = "frameworks' programs"
COMPILED = "torch.compile, counted as eager execution"
EXPANDABLE, SETTINGS = "one GPU, expandable segments", "one GPU, allocator settings"
SEVERAL_EXPANDABLE = "several GPUs, expandable segments"
SEVERAL_SETTINGS = "several GPUs, allocator settings"
_MODULES = {"huggingface": "transformers modules"}
_ENGINES = {"ddp": "DDP", "fsdp1": "FSDP1", "fsdp2": "FSDP2", "megatron": "Megatron-Core"}


def kinds_of(spec: Spec) -> tuple[str, ...]:
    """Return the kinds of a run in eager execution, narrowest first; the first with enough runs gives its errors.

    Allocator settings form a separate kind: runs under default settings do not predict them. So does FP8: torchao
    compiles its conversions, and their requests are not modelled one by one.
    """
    if spec.inference is not None:
        return _of_generation(spec)
    if spec.training.alloc_conf and spec.parallelism.ranks > 1:
        return (SEVERAL_EXPANDABLE,) if _expands(spec.training) else (SEVERAL_SETTINGS,)
    return _on_one_gpu(spec.training) if spec.parallelism.trains_alone else _on_several_gpus(spec)


def program_kinds(spec: Spec) -> tuple[str, ...]:
    """Return the kinds of a framework's program, narrowest first; empty for memcalc's own training step.

    That step does not predict the other allocations of a program. Only Megatron-LM trains Megatron-Core's modules.
    DeepSpeed's pipeline engine was recorded in programs alone. They reserve what is replayed, but only of one model
    definition, so all programs give their errors.
    """
    if spec.inference is not None:
        return ()
    if spec.training.implementation == "megatron":
        return f"{PROGRAMS}, {_ENGINES['megatron']}", PROGRAMS
    if spec.parallelism.has_pipeline_engine:
        return (PROGRAMS,)
    if spec.training.framework is None:
        return ()
    parallelism = spec.parallelism
    engine = "DeepSpeed" if parallelism.engine == "deepspeed" else _ENGINES.get(parallelism.engine, parallelism.engine)
    return f"{PROGRAMS}, {ONE_GPU if parallelism.trains_alone else engine}", PROGRAMS


def _of_generation(spec: Spec) -> tuple[str, ...]:
    """Return the kinds of a generation; those that were never recorded have no wider one of similar runs."""
    from memcalc.architectures.huggingface.catalogue import WITH_CACHE  # a training step does not need these
    from memcalc.generation.forwards import is_long

    assert spec.inference is not None
    if spec.parallelism.ranks > 1:
        return (f"{GENERATION}, {SEVERAL_GPUS}",)
    if spec.inference.cache == "paged":
        return (f"{GENERATION}, paged cache",)
    if spec.training.implementation != "huggingface" or spec.model.architecture not in WITH_CACHE:
        return (f"{GENERATION}, general block",)
    if is_long(spec.inference, spec.model.num_layers):
        return (f"{GENERATION}, every n-th token",)
    return f"{GENERATION}, modules of the family", GENERATION


def _on_one_gpu(training: TrainingSpec) -> tuple[str, ...]:
    if training.alloc_conf:
        return (EXPANDABLE,) if _expands(training) else (SETTINGS,)
    if training.fp8 != "none":
        return (FP8,)
    if training.offload_activations != "none":
        narrow = "offloaded activations"
    elif training.finetune != "full":
        narrow = "QLoRA" if training.finetune == "qlora" else "LoRA"
    else:
        narrow = _MODULES.get(training.implementation, f"{training.implementation} modules")
    return f"{ONE_GPU}, {narrow}", ONE_GPU


def _expands(training: TrainingSpec) -> bool:
    return "expandable_segments:True" in training.alloc_conf


def _on_several_gpus(spec: Spec) -> tuple[str, ...]:
    parallelism = spec.parallelism
    if spec.training.fp8 != "none":
        return (FP8,)
    if spec.training.implementation == "megatron" or parallelism.engine == "megatron":
        return "Megatron-Core", SEVERAL_GPUS
    if parallelism.engine == "deepspeed":
        offload = "" if parallelism.offload == "none" else ", offload to the host"
        return f"DeepSpeed stage {parallelism.zero_stage}{offload}", "DeepSpeed", SEVERAL_GPUS
    if parallelism.offload != "none":
        return "offload to the host", SEVERAL_GPUS
    if parallelism.pipeline_parallel > 1 and not any(lacks(spec)):  # other pipelines were not recorded
        return "pipeline stages", SEVERAL_GPUS
    if parallelism.tensor_parallel > 1 and not (parallelism.engine == "fsdp2" and parallelism.shards > 1):
        return "tensor parallelism", SEVERAL_GPUS
    return _ENGINES.get(parallelism.engine, parallelism.engine), SEVERAL_GPUS
