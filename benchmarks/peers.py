"""The same training steps through PyTorch's own MemTracker and through memcalc, and append what each says, and when.

    python benchmarks/peers.py benchmarks/recordings/peers/peers.jsonl --null-python .venv-null/bin/python

MemTracker (torch.distributed._tools) sees the operators of a step on fake tensors. On a machine without a GPU these lie
on the CPU, as here. It runs the very step that memcalc traces, three times over, from building the model on. Every
figure is of a process of its own, whole: imports count. Cases that are recorded are skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

CASES = (
    "gpt2 b=1 s=1024 recipe=amp attention=flash",
    "llama-3.2-1b b=1 s=2048 recipe=pure attention=flash",
    "llama-3-8b b=1 s=2048 recipe=pure attention=flash",
)
CARD = "h100-80gb"
STEPS = 3

TRACKED = f"""
import contextlib, sys, torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
import memcalc
from memcalc.step.loop import TrainingRun

class EachStepAnew:  # MemTracker refuses a module that is called again
    def phase(self, name):
        if name.startswith("zero_grad"):
            tracker.reset_mod_stats()
        return contextlib.nullcontext()

spec = memcalc.load(*sys.argv[1:], gpu={CARD!r})
with FakeTensorMode(), MemTracker() as tracker:
    TrainingRun(spec, torch.device("cpu")).execute({STEPS}, EachStepAnew())
print(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])
"""
TRACED = f"""
import sys, memcalc
trace = memcalc.trace(*sys.argv[2:], gpu={CARD!r}, steps={STEPS}, device=sys.argv[1])
print(trace.result.ledger.peak_bytes)
"""
TOOLS = {
    "MemTracker, CPU": (TRACKED,),
    "memcalc, fake tensors": (TRACED, "fake"),
    "memcalc, null device": (TRACED, "null"),
}


def main() -> None:
    """Parse the command line and run what has no record yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", type=Path)
    parser.add_argument("--null-python", default="", help="an interpreter with a CUDA build of torch")
    arguments = parser.parse_args()
    lines = arguments.recordings.read_text().splitlines() if arguments.recordings.exists() else []
    known = {(record["case"], record["tool"]) for record in map(json.loads, lines)}
    environment = os.environ | {"MEMCALC_NULL_PYTHON": arguments.null_python}
    for case in CASES:
        for tool, (program, *words) in TOOLS.items():
            if (case, tool) in known or ("null" in words and not arguments.null_python):
                continue
            record = run(program, [*words, *case.split()], environment)
            whole = {"case": case, "tool": tool, "gpu": CARD, "steps": STEPS, **record}
            with arguments.recordings.open("a") as file:
                file.write(json.dumps(whole, separators=(",", ":")) + "\n")
            print(f"{case} | {tool}: {record['peak']:,} bytes in {record['seconds']} s", flush=True)


def run(program: str, words: list[str], environment: dict[str, str]) -> dict[str, object]:
    """Return the output of a process, with bytes, wall-clock seconds and CPU seconds."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    finished = subprocess.run(
        [sys.executable, "-c", program, *words], env=environment, check=True, capture_output=True, text=True
    )
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"torch": torch.__version__},
        "peak": int(finished.stdout.split()[-1]),
        "seconds": round(seconds, 2),
        "processor_seconds": round(busy, 2),
    }


if __name__ == "__main__":
    main()
