"""How long `memcalc trace` takes on fake tensors, whole command: three steps of the reference decoder, every layer.

    python benchmarks/trace.py

Wall-clock seconds and the largest resident memory of whole processes, imports counted, beside what importing torch
takes alone.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

ROUNDS = 5
CONFIGS = ("gpt2.yaml", "llama-3-8b.yaml", "llama-3.1-405b.yaml")


def run(*command: str) -> tuple[float, float]:
    """Seconds and MB of one process."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    if status:
        sys.exit(f"{' '.join(command)} ended with status {status}")
    return seconds, usage.ru_maxrss * 1024 / 1e6  # Linux counts in KiB


def main() -> None:
    """Print a line for each configuration."""
    imports = [run("-c", "import torch")[0] for _ in range(ROUNDS)]
    print(f"import torch: {statistics.median(imports):.2f} s")
    for config in CONFIGS:
        rounds = [run("-m", "memcalc", "trace", config) for _ in range(ROUNDS)]
        seconds = [taken for taken, _ in rounds]
        print(
            f"{config}: {statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f}), "
            f"{max(memory for _, memory in rounds):.0f} MB"
        )


if __name__ == "__main__":
    main()
