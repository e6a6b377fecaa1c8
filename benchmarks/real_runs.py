"""Run cases of dry_runs.yaml on this machine's GPU, and append their memory next to that of their dry runs.

    python benchmarks/real_runs.py single benchmarks/recordings/gpu/new/FILE.jsonl [--case NAME] [--timeout SECONDS]

The scripts are run as they are, by this Python, each in a process of its own. Cases that need more than one GPU,
another program than Python, or weights that the dry run invents (`random_weights`) are left out; recorded ones are
skipped.
"""

from __future__ import annotations

import argparse
import json
import runpy
import shlex
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
PYTHON = "{bin}/python "  # how the commands begin that can be run here
TIMEOUT = 300  # seconds


def main() -> None:
    """Parse the command line, then run what has no record; with --inside, one script, here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("group", help="a list in dry_runs.yaml")
    parser.add_argument("record", type=Path, help="file that records are appended to")
    parser.add_argument("--case", action="append", help="run these only")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds of one case")
    arguments = parser.parse_args()
    arguments.record.parent.mkdir(parents=True, exist_ok=True)
    lines = arguments.record.read_text().splitlines() if arguments.record.exists() else []
    known = {json.loads(line)["case"] for line in lines}
    for case in yaml.safe_load((HERE / "dry_runs.yaml").read_text())[arguments.group]:
        name = case["case"]
        if name in known or (arguments.case and name not in arguments.case) or not runs_here(case):
            continue
        found = run_case(case, arguments.timeout)
        print(name, found["outcome"], found["seconds"], flush=True)
        with arguments.record.open("a") as file:
            file.write(json.dumps(found, separators=(",", ":")) + "\n")


def runs_here(case: dict[str, Any]) -> bool:
    """Whether a case is a script for one GPU that needs nothing invented."""
    one = case.get("gpus", 1) == 1 and "variables" not in case
    return one and case["command"].startswith(PYTHON) and not case["options"].get("random_weights")


def run_case(case: dict[str, Any], timeout: float) -> dict[str, Any]:
    """One case; what it prints goes to standard error."""
    words = shlex.split(case["command"].removeprefix(PYTHON).format(here=HERE))
    start = time.perf_counter()
    command = [sys.executable, __file__, "--inside", *words]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=timeout, check=False)
        outcome = f"exit code {done.returncode}" if done.returncode else "done"
        held = {} if done.returncode else json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        outcome, held = "out of time", {}
    return {
        "case": case["case"],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": case["command"],
        "outcome": outcome,
        "seconds": round(time.perf_counter() - start, 1),
        "versions": {"python": sys.version.split()[0], **{name: version(name) for name in case["packages"]}},
        **held,
    }


def inside(script: str, *arguments: str) -> None:
    """Run a script as the main program; then print what its process held. Bytes."""
    import torch

    free, total = torch.cuda.mem_get_info()
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    kept = runpy.run_path(script, run_name="__main__")
    after, _ = torch.cuda.mem_get_info()
    print(
        json.dumps(
            {
                "device": torch.cuda.get_device_name(),
                "total_bytes": total,
                "allocated_bytes": torch.cuda.max_memory_allocated(),
                "reserved_bytes": torch.cuda.max_memory_reserved(),
                "grown_bytes": free - after,
            }
        )
    )
    del kept


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        inside(*sys.argv[2:])
    else:
        main()
