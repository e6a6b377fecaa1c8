"""The rules of offload to the host: whose engine does it, and with which optimizers."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.spec.broken import Broken
from memcalc.spec.spec import Spec
from memcalc.spec.yaml_source import Path

# DeepSpeed 0.19 runtime/zero/utils.py: ZERO_SUPPORTED_OPTIMIZERS, those of them that have kernels for the CPU.
DEEPSPEED_ON_THE_CPU = ("adam", "adamw", "adagrad", "lion")
# Those of torch.optim, whose operators the CPU has; bitsandbytes' and torchao's have kernels for devices only.
TORCH_ON_THE_CPU = (
    *("sgd", "momentum", "adam", "adamw", "adagrad", "adadelta", "adamax", "nadam", "radam", "rmsprop", "rprop"),
    *("asgd", "adafactor", "lion"),
)

KEY: Path = ("parallelism", "offload")


def offload(spec: Spec) -> Iterator[Broken]:
    """DeepSpeed's optimizer on the host, from stage 2 on; FSDP2's CPUOffloadPolicy, which takes all there is."""
    parallelism = spec.parallelism
    if parallelism.offload == "none":
        return
    if parallelism.offload == "all":
        yield from _everything(spec)
    else:
        yield from _optimizer(spec)
    if parallelism.shards == 1:
        yield Broken(
            KEY,
            f"offload = {parallelism.offload} on one rank is not modelled: an engine's buffers are those of several.",
            "Set data_parallel: 2 or more, or offload: none to count it on the device.",
        )
    yield from _kernels(spec, TORCH_ON_THE_CPU if parallelism.engine == "fsdp2" else DEEPSPEED_ON_THE_CPU)


def _optimizer(spec: Spec) -> Iterator[Broken]:
    parallelism = spec.parallelism
    if parallelism.engine == "fsdp2":
        yield Broken(
            KEY,
            f"offload = {parallelism.offload} with engine = fsdp2, whose CPUOffloadPolicy takes parameters along.",
            "Set offload: all, or engine: deepspeed.",
        )
    elif parallelism.engine != "deepspeed" or parallelism.zero_stage < 2:
        yield Broken(
            KEY,
            f"offload = {parallelism.offload} with engine = {parallelism.engine} and zero_stage = "
            f"{parallelism.zero_stage}; what is modelled is DeepSpeed's, from stage 2 on.",
            "Set engine: deepspeed and zero_stage: 2 or 3.",
        )


def _everything(spec: Spec) -> Iterator[Broken]:
    parallelism = spec.parallelism
    if parallelism.engine != "fsdp2":
        yield Broken(
            KEY,
            f"offload = all with engine = {parallelism.engine}; what is modelled is FSDP2's CPUOffloadPolicy.",
            "Set engine: fsdp2, or offload: optimizer with engine: deepspeed.",
        )


def _kernels(spec: Spec, optimizers: tuple[str, ...]) -> Iterator[Broken]:
    training = spec.training
    if training.optimizer not in optimizers:
        yield Broken(
            ("training", "optimizer"),
            f"optimizer = {training.optimizer} has no kernel for the host, where offload runs it.",
            f"Set one of {', '.join(optimizers)}.",
        )
    elif training.optimizer_options.paged:
        yield Broken(
            ("training", "optimizer_options", "paged"),
            f"paged = true with offload = {spec.parallelism.offload}: bitsandbytes' kernels run on a device.",
            "Set paged: false; the states are on the host then.",
        )
