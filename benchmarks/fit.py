"""How long `memcalc fit` takes for GPT-3 175B over 1,024 A100s with 80 GB, as a whole process, all layouts.

With Megatron-Core's modules it must also find the published layout among those that fit: tensor 8, pipeline 8, 3 chunks
a stage (Korthikanti et al., arXiv 2205.05198, table 3).
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

COMMAND = [sys.executable, "-m", "memcalc", "fit", "gpt3", "--gpu", "a100-80gb", "--gpus", "1024", "--format", "json"]
MEGATRON = ("implementation=megatron", "recipe=mixed-18", "loss=vocab-parallel", "optimizer_implementation=fused")
MODULES = {"plain modules": (), "Megatron-Core modules": MEGATRON}
PUBLISHED = {"tensor_parallel": 8, "pipeline_parallel": 8, "virtual_stages": 3, "sequence_parallel": True}


def main() -> None:
    """Print the median of several runs, what was searched, and where the published layout stands."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    for modules, overrides in MODULES.items():
        print(f"\nas {modules}")
        search([*COMMAND, *(word for override in overrides for word in ("--set", override))], runs)


def search(command: list[str], runs: int) -> None:
    """Print the figures of one command."""
    seconds = []
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(runs):
        start = time.perf_counter()
        process = subprocess.run(command, check=True, capture_output=True, text=True)
        seconds.append(time.perf_counter() - start)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    layouts = json.loads(process.stdout)["layouts"]
    places = [
        place
        for place, layout in enumerate(layouts["fitting"], 1)
        if all(layout[field] == value for field, value in PUBLISHED.items())
    ]

    processor = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / runs
    print(f"whole process      {statistics.median(seconds):.2f} s (median of {runs}; {processor:.2f} s of processor)")
    print(f"layouts            {layouts['tried']:,}, of which {len(layouts['fitting']):,} fit")
    print(f"published layout   number {', '.join(map(str, places)) or 'none'} by cost")


if __name__ == "__main__":
    main()
