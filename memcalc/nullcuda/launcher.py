"""Environment variables that let a process use the null device in place of a GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from memcalc.directories import compiler_cache
from memcalc.errors import InputError
from memcalc.nullcuda.build import PROGRAMS, device_folder
from memcalc.nullcuda.gpu_description import MOST_GPUS, find_null_gpu, properties
from memcalc.nullcuda.options import BALANCED, Options
from memcalc.nullcuda.torch_build import find_torch

HOOK = Path(__file__).parent / "hook"
EXCHANGE = "exchange"


def environment(
    gpu: str,
    gpus: int = 1,
    *,
    pythons: Sequence[str] = (sys.executable,),
    reports: Path | None = None,
    **options: Unpack[Options],
) -> dict[str, str]:
    """Return variables to add to a child process's environment; its Pythons then see `gpus` of this GPU.

    The device is built first if it is missing.

    Args:
        gpu: a GPU of `memcalc gpus`.
        gpus: number of GPUs.
        pythons: interpreters; the first with a CUDA build of torch decides which device is built.
        reports: directory for the processes' reports, and for messages between processes.
        options: see `Options`.

    Raises:
        InputError: the GPU is unknown, or there are too many.
        Unavailable: no Linux, no CUDA build of torch, no C compiler, or no writable cache.
    """
    found = find_null_gpu(gpu)
    if not 1 <= gpus <= MOST_GPUS:
        raise InputError(
            f"gpus = {gpus} is out of range: one machine has 1 to {MOST_GPUS} GPUs.",
            "For larger jobs simulate one rank: --gpus 8 --world-size N (docs/guides/dry-run.md).",
            "--gpus",
        )
    alone = one_rank(gpus, options)
    folder = str(device_folder(find_torch(pythons)))
    if reports is not None:
        (reports / EXCHANGE).mkdir(exist_ok=True)
    return {
        "MEMCALC_NULL_DEVICE": folder,
        "MEMCALC_NULL_CARD": found.name,
        "MEMCALC_NULL_PROPERTIES": properties(found, gpus, delayed_events=options.get("delayed_events", False)),
        "MEMCALC_NULL_STEPS": str(options.get("steps") or 0),
        "MEMCALC_NULL_SKIP_INIT": str(int(options.get("skip_init", False))),
        "MEMCALC_NULL_RANDOM_WEIGHTS": str(int(options.get("random_weights", False))),
        "MEMCALC_NULL_ROUTING": options.get("routing", BALANCED),
        "MEMCALC_NULL_HISTORY": str(int(options.get("history", False))),
        "MEMCALC_NULL_REPORTS": "" if reports is None else str(reports),
        # Directory of small messages between the processes of a run (src/exchange.c).
        "MEMCALC_NULL_EXCHANGE": "" if reports is None or alone else str(reports / EXCHANGE),
        "PYTHONPATH": _before(str(HOOK), "PYTHONPATH"),
        # For libraries loaded by name at run time, such as libcuda.so.1; the hook loads those of torch.
        "LD_LIBRARY_PATH": _before(folder, "LD_LIBRARY_PATH"),
        # For Triton, which links its launchers against these libraries.
        "LIBRARY_PATH": _before(folder, "LIBRARY_PATH"),
        "TRITON_LIBCUDA_PATH": folder,
        "PATH": _before(os.path.join(folder, PROGRAMS), "PATH"),  # noqa: PTH118 -- a string
        # The machine's own setting does not refer to the emulated GPUs.
        "CUDA_VISIBLE_DEVICES": ",".join(str(number) for number in range(gpus)),
        # For a Python that ignores PYTHONPATH; otherwise the hook switches off cuDNN's attention.
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",
        # Convolutions use the cuDNN interface that stubs can emulate (src/cudnn.c).
        "TORCH_CUDNN_V8_API_DISABLED": "1",
        # Autotuning results on the null device must not be reused on a real GPU.
        **({} if reports is None else compiler_cache(reports)),
        **alone,
    }


def one_rank(gpus: int, options: Options) -> dict[str, str]:
    """Return torchrun's variables for one rank of a multi-rank job; {} if all ranks are started.

    Raises:
        InputError: the job has no such rank.
    """
    world, rank = options.get("world_size"), options.get("rank", 0)
    if world is None:
        if rank:
            raise InputError(
                f"rank = {rank}, but the number of ranks of the run is missing.",
                "Add --world-size N.",
                "--world-size",
            )
        return {}
    if not 0 <= rank < world:
        raise InputError(f"rank = {rank} is out of range.", f"Choose 0 to {world - 1}.", "--rank")
    node, local = divmod(rank, gpus)
    return {
        "MEMCALC_NULL_ALONE": "1",
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(gpus),
        "GROUP_RANK": str(node),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",  # torchrun's default; nothing listens there
        # Its thread would monitor the other ranks.
        "TORCH_NCCL_ENABLE_MONITORING": "0",
    }


def _before(entry: str, variable: str) -> str:
    """Return a search path with an entry prepended."""
    rest = os.environ.get(variable)
    return f"{entry}{os.pathsep}{rest}" if rest else entry
