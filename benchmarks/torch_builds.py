"""The null device with several builds of PyTorch: built, held to the tests of its allocator, and two models' steps.

    python benchmarks/torch_builds.py benchmarks/recordings/dry-runs/torch-builds.jsonl ENV/bin/python [...]

Each interpreter has one CUDA build of torch, with numpy, as the Makefile makes .venv-null; transformers' models are run
where it is installed. A recorded build is recorded again. The tests are those of
tests/nullcuda/test_allocator.py: golden traces, as far as they are of that release, and random traces against the model
of the allocator.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.nullcuda import STEPS, Timed, time_step
from memcalc.nullcuda.build import device_folder
from memcalc.nullcuda.torch_build import find_torch

ROOT = Path(__file__).resolve().parents[1]
CARD = "h100-80gb"


def main(file: str, *pythons: str) -> None:
    """Record each build."""
    records = Path(file)
    lines = records.read_text().splitlines() if records.exists() else []
    known = {line["torch"]: line for line in map(json.loads, lines)}
    for python in pythons:
        record = looked_at(os.path.abspath(python))  # noqa: PTH100 -- resolve() would leave the environment
        known[record["torch"]] = record
        print(record, flush=True)
        ordered = sorted(known.values(), key=lambda line: [int(part) for part in re.findall(r"\d+", line["torch"])[:3]])
        records.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in ordered))


def looked_at(python: str) -> dict[str, Any]:
    """One record. Bytes, and seconds."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        torch = find_torch([python])
        start = time.perf_counter()
        device_folder(torch)
        built = time.perf_counter() - start
        here = subprocess.run([python, "-m", "pip", "list"], capture_output=True, text=True, check=True).stdout
        names = [name for name in STEPS if "transformers" not in name or "transformers" in here]
        steps = {name: step_record(time_step(python, name, CARD, Path(folder))) for name in names}
        tests = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-m", "", "tests/nullcuda/test_allocator.py"],
            env=os.environ | {"MEMCALC_NULL_PYTHON": python},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    return {
        "torch": torch.version,
        "libraries_of_nvidia": len(re.findall(r"^nvidia-(?!ml-py)", here, re.MULTILINE)),
        "cuda": ".".join(map(str, torch.cuda)),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "load": round(os.getloadavg()[0], 1),
        "build_seconds": round(built, 1),
        "tests": {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped)", tests.stdout)},
        "steps": steps,
    }


def step_record(timed: Timed) -> dict[str, Any]:
    """Return memory and CPU seconds of one model's steps."""
    return {
        "allocated_bytes": timed.found.allocated_bytes,
        "reserved_bytes": timed.found.reserved_bytes,
        "step_seconds": round(timed.quickest, 4),
        "command_seconds": round(timed.command, 2),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
