"""Whose configuration puts what on the host."""

from __future__ import annotations

from memcalc.importers.table import Draft
from memcalc.spec.offload_rules import DEEPSPEED_ON_THE_CPU, TORCH_ON_THE_CPU


def place_optimizer(draft: Draft, device: object) -> None:
    """DeepSpeed's masters and optimizer states on the host, where the run is one whose offload is modelled."""
    if device not in ("cpu", "nvme"):
        return
    stage = draft.values.get("parallelism.zero_stage", 0)
    if stage not in (2, 3) or not _is_spread(draft, DEEPSPEED_ON_THE_CPU):
        draft.notes.append("not modelled: offload_optimizer of such a run; what is offloaded is counted on the device")
        return
    draft.default("parallelism.offload", "optimizer")
    if device == "nvme":
        draft.notes.append("not modelled: offload_optimizer to NVMe; it is counted on the host")


def place_shards(draft: Draft) -> None:
    """FSDP2's shards on the host, and with them gradients and optimizer states, where that is modelled."""
    engine = draft.values.get("parallelism.engine")
    whole = draft.values.get("training.finetune", "full") == "full"
    if engine != "fsdp2" or not whole or not _is_spread(draft, TORCH_ON_THE_CPU):
        draft.notes.append("not modelled: offload of such a run's shards; they are counted on the device")
        return
    draft.default("parallelism.offload", "all")


def _is_spread(draft: Draft, optimizers: tuple[str, ...]) -> bool:
    """Whether there are several GPUs, as far as is known, and an optimizer that the host has kernels for."""
    known = draft.values.get("training.optimizer", "adamw") in optimizers
    paged = draft.values.get("training.optimizer_options.paged", False)
    return known and not paged and draft.values.get("parallelism.data_parallel") != 1
