"""Trace rank 0 of FSDP2 on fake tensors at world sizes from 1 to 1,024, and append what it holds.

    python benchmarks/world_sizes.py benchmarks/recordings/traces/world-sizes.jsonl

Each preset whole, as it is trained: mixed-16, AdamW, b=1, s=2048, flash attention. Recorded cases are skipped;
docs/reports/accuracy.md lays the estimate of the day beside them.
"""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import memcalc

PRESETS = ("llama-3-8b", "llama-3-70b")
WORLD_SIZES = (1, 2, 8, 64, 256, 1024)
SETTINGS = ("recipe=mixed-16", "micro_batch_size=1", "sequence_length=2048", "engine=fsdp2", "zero_stage=3")
CARD = "h100-80gb"


def main() -> None:
    """Parse the command line and trace what has no record yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", type=Path)
    recordings = parser.parse_args().recordings
    known = {json.loads(line)["case"] for line in recordings.read_text().splitlines()} if recordings.exists() else set()
    for preset in PRESETS:
        for ranks in WORLD_SIZES:
            case = case_of(preset, ranks)
            if case in known:
                continue
            record = traced(case)
            with recordings.open("a") as file:
                file.write(json.dumps(record, separators=(",", ":")) + "\n")
            print(f"{case}: {max(record['phases'].values()):,}", flush=True)


def case_of(preset: str, ranks: int) -> str:
    """A preset and its overrides, as on a command line; one rank shares nothing out."""
    settings = SETTINGS if ranks > 1 else SETTINGS[:-2]
    return " ".join((preset, *settings, *([f"data_parallel={ranks}"] if ranks > 1 else [])))


def traced(case: str) -> dict[str, Any]:
    """One record. Bytes; components of the steady step, when everything that stays has come."""
    preset, *overrides = case.split()
    ledger = memcalc.trace(memcalc.load(preset, *overrides, gpu=CARD), steps=2).result.ledger
    return {
        "case": case,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": f"fake:{CARD}",
        "versions": {"torch": torch.__version__},
        "phases": ledger.totals,
        "held": {component.value: held for component, held in ledger.components("optimizer_step_2").items()},
        "at_peak": {component.value: held for component, held in ledger.components("backward_2").items()},
    }


if __name__ == "__main__":
    main()
