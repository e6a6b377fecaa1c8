"""Trace presets and replay each through every allocator: the source of a table in docs/reference/allocators.md.

    python -m benchmarks.policies benchmarks/recordings/policies.json [--most N] [--skip N]

A few runs of different shapes, and every preset that the step can run and that trains on one GPU: b=1, s=1024 (or all
its positions), pure bf16, AdamW, on the smallest of the GPUs below that holds it. Runs in the file are skipped.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import memcalc
from benchmarks.record_traces import cases
from memcalc.errors import MemcalcError
from memcalc.replaying import ReplayComparison, Trial

CARDS = ("a100-80gb", "h200", "b200", "b300")
PLAIN = " implementation=plain"
RUNS = (
    "gpt2 b=8 s=1024",
    "gpt2-xl b=2 s=1024",
    "qwen2.5-0.5b b=4 s=1024 optimizer_implementation=fused",
    "llama-3.2-1b b=2 s=2048",
    "llama-3.2-1b b=8 s=2048 recompute=full",
    "llama-3-8b s=2048 recipe=pure recompute=full",
)


def runs() -> Iterator[tuple[str, str]]:
    """Each run with its GPU."""
    for run in RUNS:
        yield run, CARDS[0]
    for case in cases():
        card = next((card for card in CARDS if fits(case, card)), None)
        if card is not None and case.endswith(PLAIN):
            yield case.removesuffix(PLAIN), card


def replayed(run: str, card: str) -> ReplayComparison | None:
    """A run through all policies, with the reference decoder or else with transformers' modules."""
    preset, *overrides = run.split()
    for modules in ((), ("implementation=huggingface",)):
        try:
            return memcalc.replay(preset, *overrides, *modules, gpu=card, compare=True)
        except MemcalcError as error:
            print(f"{run} {' '.join(modules)}: {error}", flush=True)
    return None


def fits(case: str, card: str) -> bool:
    """Return whether the run fits, according to the estimate."""
    preset, *overrides = case.split()
    try:
        return bool(memcalc.estimate(preset, *overrides, gpu=card).fits)
    except MemcalcError:
        return False


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
    """Write the figures of the runs that have none yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--most", type=int, default=1000, help="how many runs at the most")
    parser.add_argument("--skip", type=int, default=0, help="how many of the missing ones to pass over")
    options = parser.parse_args()
    found = json.loads(options.file.read_text()) if options.file.exists() else []
    missing = [(run, card) for run, card in runs() if run not in {one["run"] for one in found}]
    for run, card in missing[options.skip :][: options.most]:
        replay = replayed(run, card)
        if replay is None:
            continue
        events = len(replay.source.events)
        found.append({"run": run, "gpu": card, "events": events, "trials": [figures(t) for t in replay.trials]})
        options.file.write_text(json.dumps(found, indent=1) + "\n")
        print(run, card, events, "events", flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
