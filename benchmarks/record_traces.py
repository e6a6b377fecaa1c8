"""Trace every preset that the step can run, on fake tensors, and append what each phase held.

    python benchmarks/record_traces.py benchmarks/recordings/traces/fake-a100-80gb.jsonl
    python benchmarks/record_traces.py benchmarks/recordings/traces/fake-reference.jsonl --cases held-out

Each preset with b=1, s=1024 (or all its positions), pure bf16, AdamW; the reference decoder and, where the step knows
it, transformers' modules. Recorded cases are skipped; docs/reports/accuracy.md compares the estimate with them.
"reserved" is on a GPU with free memory, "least" the smallest memory in which the run ends.

With --cases, a list of reference_cases.yaml instead, as record_reference.py runs it on the null device.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml

import memcalc
from benchmarks.min_capacity import least_memory
from memcalc.errors import MemcalcError
from memcalc.ledger.component import Component
from memcalc.spec.presets import preset_names
from memcalc.spec.spec import Spec

CARD = "a100-80gb"
STEPS = 2
REFERENCE = Path(__file__).with_name("reference_cases.yaml")
REFERENCE_STEPS = 3
LONGEST = 1024  # tokens


def main() -> None:
    """Parse the command line and trace what has no record yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", type=Path)
    parser.add_argument("--cases", help="a list in reference_cases.yaml")
    parser.add_argument("--card", default=CARD)
    arguments = parser.parse_args()
    arguments.recordings.parent.mkdir(parents=True, exist_ok=True)
    lines = arguments.recordings.read_text().splitlines() if arguments.recordings.exists() else []
    records = [json.loads(line) for line in lines]
    known = {record["case"] for record in records if record["device"] == f"fake:{arguments.card}"}
    if arguments.cases is None:
        listed, steps = [[case, case.replace("attention=flash", "attention=eager")] for case in cases()], STEPS
    else:
        listed, steps = [[case] for case in yaml.safe_load(REFERENCE.read_text())[arguments.cases]], REFERENCE_STEPS
    for attempts in listed:  # transformers' modules of some families have no fused attention
        for attempt in attempts:
            if attempt in known:
                break
            try:
                record = traced(attempt, arguments.card, steps)
            except MemcalcError as error:
                print(f"{attempt}: {error}", flush=True)
                continue
            known.add(attempt)
            with arguments.recordings.open("a") as file:
                file.write(json.dumps(record, separators=(",", ":")) + "\n")
            print(f"{attempt}: {max(record['phases'].values()):,}", flush=True)
            gc.collect()
            break


def cases() -> Iterator[str]:
    """A preset and its overrides, as on a command line."""
    for preset in preset_names():
        length = min(LONGEST, memcalc.load(preset).model.max_position_embeddings)
        for implementation in ("plain", "huggingface"):
            # Where positions are a bias on the scores, no fused kernel can add it.
            alibi = memcalc.load(preset).model.position_embedding == "alibi"
            attention = "eager" if alibi or "codegen" in preset else "flash"
            yield f"{preset} b=1 s={length} recipe=pure attention={attention} implementation={implementation}"


def load(case: str, card: str = CARD) -> Spec:
    """The run of a case."""
    preset, *overrides = case.split()
    return memcalc.load(preset, *overrides, gpu=card)


def traced(case: str, card: str, steps: int) -> dict[str, Any]:
    """One record. Bytes."""
    trace = memcalc.trace(load(case, card), steps=steps)
    ledger = trace.result.ledger
    return {
        "case": case,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": f"fake:{card}",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "parameters": trace.result.parameters,
        "activations": ledger.components("loss_2").get(Component.ACTIVATIONS, 0),
        "phases": ledger.totals,
        "reserved": trace.reserved_bytes,
        "least": least_memory(trace.events),
    }


if __name__ == "__main__":
    main()
