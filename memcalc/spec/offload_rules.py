"""The rules of offload to the host: whose engine does it, and with which optimizers."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.spec.broken import Broken
from memcalc.spec.spec import Spec

# DeepSpeed 0.19 runtime/zero/utils.py: ZERO_SUPPORTED_OPTIMIZERS, those of them that have kernels for the CPU.
ON_THE_CPU = ("adam", "adamw", "adagrad", "lion")


def offload(spec: Spec) -> Iterator[Broken]:
    """DeepSpeed's optimizer on the host, from stage 2 on."""
    training, parallelism = spec.training, spec.parallelism
    if parallelism.offload == "none":
        return
    key = ("parallelism", "offload")
    if parallelism.engine != "deepspeed" or parallelism.zero_stage < 2:
        yield Broken(
            key,
            f"offload = {parallelism.offload} with engine = {parallelism.engine} and zero_stage = "
            f"{parallelism.zero_stage}; what is modelled is DeepSpeed's, from stage 2 on.",
            "Set engine: deepspeed and zero_stage: 2 or 3.",
        )
    elif parallelism.shards == 1:
        yield Broken(
            key,
            f"offload = {parallelism.offload} on one rank is not modelled: ZeRO's buffers are those of several.",
            "Set data_parallel: 2 or more, or offload: none to count it on the device.",
        )
    if training.optimizer not in ON_THE_CPU:
        yield Broken(
            ("training", "optimizer"),
            f"optimizer = {training.optimizer} has no kernel for the host, where offload runs it.",
            f"Set one of {', '.join(ON_THE_CPU)}.",
        )
