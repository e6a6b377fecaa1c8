"""Trace presets and replay each through every allocator: the table in docs/allocators.md is made from what it writes.

python -m benchmarks.policies benchmarks/recordings/policies.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import memcalc
from memcalc.replaying import Trial

CARD = "a100-80gb"
RUNS = (
    "gpt2 b=8 s=1024",
    "gpt2-xl b=2 s=1024",
    "qwen2.5-0.5b b=4 s=1024 optimizer_implementation=fused",
    "llama-3.2-1b b=2 s=2048",
    "llama-3.2-1b b=8 s=2048 recompute=full",
    "llama-3-8b s=2048 recipe=pure recompute=full",
)


def figures(trial: Trial) -> dict[str, Any]:
    """What the table shows of one allocator."""
    result = trial.result
    head: dict[str, Any] = {"allocator": trial.policy, "settings": trial.config}
    if result is None:
        return head | {"refused": trial.refused}
    return head | {
        "fits": result.fits,
        "peak_allocated_bytes": result.peak_allocated,
        "peak_reserved_bytes": result.peak_reserved,
        "device_calls": result.device_allocations + result.device_frees,
    }


def main() -> None:
    """Write the figures of all runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    found = []
    for run in RUNS:
        preset, *overrides = run.split()
        replay = memcalc.replay(preset, *overrides, gpu=CARD, compare=True)
        found.append(
            {
                "run": run,
                "gpu": CARD,
                "events": len(replay.source.events),
                "trials": [figures(t) for t in replay.trials],
            }
        )
        print(run, len(replay.source.events), "events")
        options.file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
