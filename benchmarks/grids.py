"""How many configurations a second one core sizes on grids, full totals by phase and component.

On one core, each grid in a process of its own, so that none finds what another has kept; processor time is counted, so
that other programs matter less.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

LENGTHS = range(128, 2049, 128)

GRIDS: dict[str, tuple[str, dict[Any, Any]]] = {
    "batches and accumulation": (
        "gpt3",
        {"b": range(1, 257), "s": range(64, 2049, 8), "gradient_accumulation_steps": [1, 2, 4, 8, 16, 32, 64, 128]},
    ),
    "batches of every length": ("gpt3", {"b": range(1, 257), "s": range(1, 2049)}),
    "batches, tensor parallelism, ZeRO, recomputation": (
        "gpt3",
        {
            "b": range(1, 65),
            "s": LENGTHS,
            "gradient_accumulation_steps": [1, 2, 4, 8, 16, 32, 64, 128],
            "tensor_parallel": [1, 2, 4, 8],
            "recompute": ["none", "selective", "full"],
            ("zero_stage", "data_parallel"): [(0, 1), (1, 8), (1, 64)],
        },
    ),
    "the same, more batches": (
        "gpt3",
        {
            "tensor_parallel": [1, 2, 4, 8],
            "recompute": ["none", "selective", "full"],
            ("zero_stage", "data_parallel"): [(0, 1), (1, 8), (1, 64)],
            "b": range(1, 257),
            "s": LENGTHS,
            "gradient_accumulation_steps": [1, 2, 4, 8, 16, 32, 64, 128],
        },
    ),
    "layouts with pipelines, accumulation": (
        "gpt3",
        {
            "recompute": ["none", "selective", "full"],
            "tensor_parallel": [1, 2, 4, 8],
            "pipeline_parallel": [1, 2, 4, 8],
            "data_parallel": [1, 8, 64],
            "zero_stage": [0, 1],
            "gradient_accumulation_steps": [1, 2, 4, 8, 16, 32, 64, 128],
            "s": LENGTHS,
            "b": range(1, 33),
        },
    ),
    "layouts with pipelines": (
        "gpt3",
        {
            "recompute": ["none", "selective", "full"],
            "tensor_parallel": [1, 2, 4, 8],
            "pipeline_parallel": [1, 2, 4, 8],
            "data_parallel": [1, 8, 64],
            "zero_stage": [0, 1],
            "s": LENGTHS,
            "b": range(1, 33),
        },
    ),
    "optimizers and recipes": (
        "llama-3-8b",
        {
            "optimizer": ["adamw", "adam-8bit", "lion", "sgd"],
            "recipe": ["mixed-16", "mixed-20", "pure"],
            "recompute": ["none", "full"],
            "s": LENGTHS,
            "b": range(1, 65),
        },
    ),
}


def main() -> None:
    """Print a line for each grid, or for the named one; each in a separate process."""
    if len(sys.argv) > 1:
        print(_rates(sys.argv[1]), flush=True)
        return
    for name in GRIDS:
        subprocess.run([sys.executable, __file__, name], check=True)


def _rates(name: str) -> str:
    """Configurations a second in the first call, and in the next one, which finds what the first has kept."""
    from memcalc.sweeping import blocks

    source, axes = GRIDS[name]
    rates = []
    for _ in range(2):
        start = time.process_time()
        count = sum(len(table) for table in blocks(source, axes, gpu="a100-80gb"))
        rates.append(count / (time.process_time() - start))
    return f"{count:11,} configurations: {rates[0]:11,.0f}, then {rates[1]:11,.0f} a second  {source}: {name}"


if __name__ == "__main__":
    main()
