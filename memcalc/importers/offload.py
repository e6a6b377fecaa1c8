"""Fields of each framework that offload tensors to host memory."""

from __future__ import annotations

from memcalc.frameworks.draft import Draft
from memcalc.importers.file_format import overcounted
from memcalc.spec.rule_sets.offload import DEEPSPEED_ON_THE_CPU, TORCH_ON_THE_CPU

# Hooks of torchtune and TRL also keep some saved tensors on the device: similar to save_on_cpu, but not identical.
ACTIVATIONS = overcounted(
    "activations", "activations offloaded to the CPU", "--set offload_activations=pinned is the closest setting"
)

WORDS = {"optimizer": "optimizer", "param": "parameters"}  # DeepSpeed's and memcalc's name


def place_optimizer(draft: Draft, device: object, parameters: object = None) -> None:
    """Set DeepSpeed's offload of fp32 master weights, optimizer states and parameters, if it is modelled."""
    where = {name: on for name, on in (("optimizer", device), ("param", parameters)) if on in ("cpu", "nvme")}
    stage, placed = draft.values.get("parallelism.zero_stage", 0), []
    for name, place in where.items():
        stages = (2, 3) if name == "optimizer" else (3,)
        if stage not in stages or ("optimizer" in where and not _has_kernels(draft, DEEPSPEED_ON_THE_CPU)):
            what = f"offload_{name} of such a run"
            draft.limit(what, "it is counted in device memory", holds_memory=False, overcounts="all")
            continue
        placed.append(name)
        if place == "nvme":
            draft.limit(f"offload_{name} to NVMe", "it is counted in host memory", holds_memory=False)
    if placed:
        draft.default("parallelism.offload", "all" if len(placed) == 2 else WORDS[placed[0]])


def place_shards(draft: Draft) -> None:
    """Set FSDP2's offload of shards, gradients and optimizer states to the CPU, if it is modelled."""
    engine = draft.values.get("parallelism.engine")
    whole = draft.values.get("training.finetune", "full") == "full"
    several = draft.values.get("parallelism.data_parallel") != 1
    if engine != "fsdp2" or not whole or not several or not _has_kernels(draft, TORCH_ON_THE_CPU):
        draft.limit(
            "offload of such a run's shards", "they are counted in device memory", holds_memory=False, overcounts="all"
        )
        return
    draft.default("parallelism.offload", "all")


def _has_kernels(draft: Draft, optimizers: tuple[str, ...]) -> bool:
    """Return whether the optimizer has CPU kernels."""
    paged = draft.values.get("training.optimizer_options.paged", False)
    return draft.values.get("training.optimizer", "adamw") in optimizers and not paged
