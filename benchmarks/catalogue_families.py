"""Trace a published model of every family that has formulas, and record it: `python benchmarks/catalogue_families.py`.

The smallest model of each family with 100 million parameters or more, as `memcalc estimate HUB_ID` reads it: a run of
transformers' Trainer, two steps with micro-batch 1 and 512 tokens, on fake tensors with CUDA's semantics. A
vision-language model is traced whole, with its vision tower frozen and with text alone.
tests/catalogue/test_traced_families.py compares the records with today's estimates.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import memcalc
from memcalc.api.sources import load
from memcalc.catalogue.shipped import CatalogueEntry, find_shipped, shipped_entries
from memcalc.spec.model_families.conversion import has_family_formulas
from memcalc.spec.model_families.multimodal import language_config
from memcalc.spec.towers import TOWERS

RECORDS = Path(__file__).parent / "recordings" / "catalogue" / "families.jsonl"
SETTINGS = ("sequence_length=512",)
STEPS = 2
LEAST = 100_000_000  # parameters: of a toy model a buffer of kilobytes is percents


def smallest() -> dict[str, CatalogueEntry]:
    """The smallest published model of each family that has formulas, of those with at least LEAST parameters."""
    found: dict[str, CatalogueEntry] = {}
    for entry in shipped_entries():
        family = entry.config["model_type"]
        language = language_config(entry.config) if family in TOWERS else entry.config
        if language is None or not has_family_formulas(language) or entry.parameters < LEAST:
            continue
        if family not in found or entry.parameters < found[family].parameters:
            found[family] = entry
    return dict(sorted(found.items(), key=lambda item: item[1].parameters))


def record(hub_id: str) -> dict[str, object]:
    """The trace of one model. Bytes."""
    entry = find_shipped(hub_id)
    assert entry is not None
    settings = (*SETTINGS, *(("vision_tower=frozen",) if entry.config["model_type"] in TOWERS else ()))
    traced = memcalc.trace(load(hub_id, *settings), steps=STEPS)
    ledger = traced.ledger
    activations = {phase: parts.get("activations", 0) for phase in ledger.phases if (parts := _parts(traced, phase))}
    return {
        "hub_id": hub_id,
        "settings": list(settings),
        "peak_phase": ledger.peak_phase,
        "peak_bytes": ledger.peak_bytes,
        "activations": activations,
    }


def _parts(traced: memcalc.api.trace_result.TracedRun, phase: str) -> dict[str, int]:
    return {part.value: size for part, size in traced.ledger.components(phase).items()}


def main() -> None:
    """Record what is missing (of the families that are named, or of all), each model in a process of its own."""
    if len(sys.argv) > 2 and sys.argv[1] == "--one":
        print(json.dumps(record(sys.argv[2])))
        return
    wanted = sys.argv[1:]
    RECORDS.parent.mkdir(parents=True, exist_ok=True)
    known = {json.loads(line)["family"] for line in RECORDS.read_text().splitlines()} if RECORDS.exists() else set()
    for family, entry in smallest().items():
        if family in known or (wanted and family not in wanted):
            continue
        done = subprocess.run(
            [sys.executable, __file__, "--one", entry.hub_id], capture_output=True, text=True, check=False
        )
        found = {"family": family}
        if done.returncode:
            found |= {"hub_id": entry.hub_id, "error": done.stderr.strip().splitlines()[-1][:300]}
        else:
            found |= json.loads(done.stdout.splitlines()[-1])
        with RECORDS.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(family, entry.hub_id, found.get("peak_bytes", found.get("error")), flush=True)


if __name__ == "__main__":
    main()
