"""Fields of each framework that offload tensors to host memory."""

from __future__ import annotations

from memcalc.frameworks.draft import Draft
from memcalc.importers.file_format import overcounted
from memcalc.spec.rule_sets.offload import DEEPSPEED_ON_THE_CPU, TORCH_ON_THE_CPU

# Hooks of torchtune and TRL keep some tensors of forward on the device, too: save_on_cpu is near, and not the same.
ACTIVATIONS = overcounted("activations offloaded to the CPU", "--set offload_activations=pinned is the closest setting")

WORDS = {"optimizer": "optimizer", "param": "parameters"}  # DeepSpeed's and ours


def place_optimizer(draft: Draft, device: object, parameters: object = None) -> None:
    """DeepSpeed's masters and optimizer states, and its parameters, on the host, where that is modelled."""
    where = {name: on for name, on in (("optimizer", device), ("param", parameters)) if on in ("cpu", "nvme")}
    stage, placed = draft.values.get("parallelism.zero_stage", 0), []
    several = draft.values.get("parallelism.data_parallel") != 1
    for name, place in where.items():
        stages = (2, 3) if name == "optimizer" else (3,)
        if (
            stage not in stages
            or not several
            or ("optimizer" in where and not _has_kernels(draft, DEEPSPEED_ON_THE_CPU))
        ):
            what = f"offload_{name} of such a run"
            draft.limit(what, "it is counted in device memory", holds_memory=False)
            continue
        placed.append(name)
        if place == "nvme":
            draft.limit(f"offload_{name} to NVMe", "it is counted in host memory", holds_memory=False)
    if placed:
        draft.default("parallelism.offload", "all" if len(placed) == 2 else WORDS[placed[0]])


def place_shards(draft: Draft) -> None:
    """FSDP2's shards on the host, and with them gradients and optimizer states, where that is modelled."""
    engine = draft.values.get("parallelism.engine")
    whole = draft.values.get("training.finetune", "full") == "full"
    several = draft.values.get("parallelism.data_parallel") != 1
    if engine != "fsdp2" or not whole or not several or not _has_kernels(draft, TORCH_ON_THE_CPU):
        draft.limit("offload of such a run's shards", "they are counted in device memory", holds_memory=False)
        return
    draft.default("parallelism.offload", "all")


def _has_kernels(draft: Draft, optimizers: tuple[str, ...]) -> bool:
    """Whether the host has kernels for the optimizer."""
    paged = draft.values.get("training.optimizer_options.paged", False)
    return draft.values.get("training.optimizer", "adamw") in optimizers and not paged
