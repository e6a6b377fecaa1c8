"""Run the reference cases on the null CUDA device, and append what they held to a file of recordings.

    python benchmarks/record_reference.py a100-80gb a100-80gb .venv-null/bin/python benchmarks/recordings/FILE.jsonl

A list in reference_cases.yaml, a card, an interpreter with PyTorch's CUDA build, and where to. Cases whose record is
there already are skipped. Each case is a process of its own, forked from one that has imported torch but has not yet
started CUDA, so that every allocator begins empty.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

CASES = Path(__file__).with_name("reference_cases.yaml")
ON_DEVICE = "on the device"  # in place of the card: how main starts this file again


def main() -> None:
    """Start this file again, on the device; there, run the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", help="a list in reference_cases.yaml")
    parser.add_argument("card", help="as in `memcalc gpus`")
    parser.add_argument("python", help="an interpreter whose torch is a CUDA build")
    parser.add_argument("recordings", type=Path, help="file that records are appended to")
    arguments = parser.parse_args()
    if arguments.card == ON_DEVICE:
        record_all(arguments.cases, arguments.recordings)
        return
    from memcalc.nullcuda import environment

    variables = os.environ | environment(arguments.card, pythons=[arguments.python])
    variables["PYTHONPATH"] += os.pathsep + str(Path(__file__).parents[1])
    again = [arguments.python, __file__, arguments.cases, ON_DEVICE, arguments.python, str(arguments.recordings)]
    subprocess.run(again, env=variables, check=True)


def record_all(cases: str, recordings: Path) -> None:
    """A fork for each case that has no record yet."""
    from memcalc.measuring import measure  # noqa: F401 -- imported once, before the forks

    known = recorded(recordings)
    for case in yaml.safe_load(CASES.read_text())[cases]:
        if command(case) in known:
            continue
        if (child := os.fork()) == 0:
            try:
                run(case, recordings)
            except Exception as error:  # noqa: BLE001 -- the next case is another process's
                print(f"{case}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            finally:
                os._exit(0)
        os.waitpid(child, 0)


def run(case: str, recordings: Path) -> None:
    """Measure one case."""
    from memcalc.errors import OutOfMemory
    from memcalc.measuring import measure
    from memcalc.spec.loading import load

    preset, *overrides = case.split()
    try:
        measurement = measure(load(preset, overrides), "cuda", steps=3, record=recordings, command=command(case))
    except OutOfMemory as error:
        print(f"{case}: {error}", flush=True)
        return
    peak = measurement.peak
    print(f"{case}: {peak.peak_allocated_bytes:,} in {peak.name}", flush=True)


def command(case: str) -> str:
    """What gives the same figures on the command line."""
    preset, *overrides = case.split()
    return " ".join(["memcalc measure", preset, *(f"--set {override}" for override in overrides)])


def recorded(recordings: Path) -> set[str]:
    """The commands that have a record."""
    if not recordings.exists():
        return set()
    return {json.loads(line)["command"] for line in recordings.read_text().splitlines()}


if __name__ == "__main__":
    main()
