"""Options of `replay`, in addition to the source and the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict


class ReplayOptions(TypedDict, total=False):
    """Options of `memcalc.api.replay`."""

    allocator: str  # a name in memcalc.allocator.registry.POLICIES; default: pytorch
    alloc_conf: str  # its settings, as PYTORCH_CUDA_ALLOC_CONF or the framework's flags
    release: str | None  # version of the framework; default: the newest one known
    memory_fraction: float | None  # as in torch.cuda.set_per_process_memory_fraction
    sweep: Sequence[str]  # settings to try, each "key=v1,v2,none"; all combinations are tried
    compare: bool  # whether to replay the other allocators, too
