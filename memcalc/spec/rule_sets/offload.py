"""Rules of CPU offload: which engines and optimizers support it; and of activation offload."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.spec.rule_sets.violations import Violation
from memcalc.spec.spec import Spec
from memcalc.spec.yaml_source import Path

# DeepSpeed 0.19 runtime/zero/utils.py: ZERO_SUPPORTED_OPTIMIZERS that have CPU kernels.
DEEPSPEED_ON_THE_CPU = ("adam", "adamw", "adagrad", "lion")
# Optimizers of torch.optim: their operators run on the CPU; bitsandbytes and torchao have GPU kernels only.
TORCH_ON_THE_CPU = (
    *("sgd", "momentum", "adam", "adamw", "adagrad", "adadelta", "adamax", "nadam", "radam", "rmsprop", "rprop"),
    *("asgd", "adafactor", "lion"),
)

# The lowest DeepSpeed stages that shard what is offloaded.
LEAST_STAGE = {"optimizer": 2, "parameters": 3, "all": 3}

KEY: Path = ("parallelism", "offload")


def offload(spec: Spec) -> Iterator[Violation]:
    """Yield violations: DeepSpeed offloads the optimizer from stage 2 and parameters at stage 3; FSDP2 offloads all."""
    parallelism = spec.parallelism
    what, engine, stage = parallelism.offload, parallelism.engine, parallelism.zero_stage
    if what == "none":
        return
    if engine == "fsdp2" and what != "all":
        yield Violation(
            KEY,
            f"engine = fsdp2 does not support offload = {what}: CPUOffloadPolicy offloads parameters, gradients and "
            "states.",
            "Set offload: all, or engine: deepspeed.",
        )
    elif engine not in ("fsdp2", "deepspeed") or (engine == "deepspeed" and stage < LEAST_STAGE[what]):
        yield Violation(
            KEY,
            f"offload = {what} needs engine = deepspeed with zero_stage = {'3' if LEAST_STAGE[what] == 3 else '2 or 3'}"
            f"{', or fsdp2' if what == 'all' else ''}, not {engine} with zero_stage = {stage}.",
            f"Set engine: deepspeed and zero_stage: {'3' if LEAST_STAGE[what] == 3 else '2 or 3'}, or offload: none.",
        )
    if parallelism.shards == 1 and engine == "fsdp2":
        yield Violation(
            KEY,
            f"offload = {what} with engine = fsdp2 on one rank is not modelled.",
            "Set data_parallel: 2 or more, engine: deepspeed, or offload: none to count it in device memory.",
        )
    if what != "parameters":
        yield from _kernels(spec, TORCH_ON_THE_CPU if engine == "fsdp2" else DEEPSPEED_ON_THE_CPU)


def _kernels(spec: Spec, optimizers: tuple[str, ...]) -> Iterator[Violation]:
    training = spec.training
    if training.optimizer not in optimizers:
        yield Violation(
            ("training", "optimizer"),
            f"optimizer = {training.optimizer} has no CPU kernel, and offload runs the optimizer on the CPU.",
            f"Set optimizer to one of {', '.join(optimizers)}.",
        )
    elif training.optimizer_options.paged:
        yield Violation(
            ("training", "optimizer_options", "paged"),
            f"paged = true needs the GPU kernels of bitsandbytes, but offload = {spec.parallelism.offload} runs the "
            "optimizer on the CPU.",
            "Set paged: false; offload already keeps the states in host memory.",
        )


def activations(spec: Spec) -> Iterator[Violation]:
    """Yield violations: validated are a model's own step on one GPU, with no layer or every layer recomputed."""
    training = spec.training
    if training.offload_activations == "none" or spec.inference is not None:
        return
    combined: dict[Path, tuple[bool, str, str]] = {
        ("parallelism",): (
            spec.parallelism.ranks > 1 and not _data_alone(spec),
            f"{spec.parallelism.ranks} ranks of engine {spec.parallelism.engine}",
            "Use one GPU, or only data parallelism with engine: fsdp2 or ddp",
        ),
        ("training", "implementation"): (
            training.implementation not in ("plain", "huggingface"),
            f"implementation = {training.implementation}",
            "Set implementation: plain or huggingface",
        ),
        ("training", "recompute"): (
            training.recompute not in ("none", "full") or bool(training.recompute_keep),
            f"recompute = {training.recompute}" + (" and recompute_keep" if training.recompute_keep else ""),
            "Set recompute: none or full, without recompute_keep",
        ),
        ("model", "mla"): (spec.model.mla is not None, "latent attention", "Use a model without latent attention"),
    }
    for key, (is_so, what, remedy) in combined.items():
        if is_so:
            yield Violation(
                key,
                f"offload_activations = {training.offload_activations} is not modelled with {what}.",
                f"{remedy}, or set offload_activations: none.",
            )


def _data_alone(spec: Spec) -> bool:
    """Return whether only PyTorch's own engines are used, for data parallelism alone."""
    parallelism = spec.parallelism
    whole = parallelism.data_parallel == parallelism.ranks and parallelism.expert_parallel == 1
    return whole and parallelism.engine in ("ddp", "fsdp2") and parallelism.offload == "none"
