"""Run the reference cases, each in a process of its own, and append what they held to a file of recordings.

    python benchmarks/record_reference.py a100-80gb benchmarks/recordings/FILE.jsonl

Cases whose record is there already are skipped. On the null CUDA device set MEMCALC_NULL_CARD, so that the records
say what they were made on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import yaml

from memcalc.errors import OutOfMemory
from memcalc.measuring import measure
from memcalc.spec.loading import load

CASES = Path(__file__).with_name("reference_cases.yaml")


def main() -> None:
    """Parse the command line, then run one case or all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", help="a list in reference_cases.yaml")
    parser.add_argument("recordings", type=Path, help="file that records are appended to")
    parser.add_argument("--case", help="run this one here instead of all in child processes")
    arguments = parser.parse_args()
    if arguments.case is not None:
        run(arguments.case, arguments.recordings)
        return
    known = recorded(arguments.recordings)
    for case in yaml.safe_load(CASES.read_text())[arguments.cases]:
        if command(case) not in known:
            subprocess.run([sys.executable, *sys.argv, "--case", case], check=True)


def run(case: str, recordings: Path) -> None:
    """Measure one case."""
    preset, *overrides = case.split()
    try:
        measurement = measure(load(preset, overrides), "cuda", steps=3, record=recordings, command=command(case))
    except OutOfMemory as error:
        print(f"{case}: {error}")
        return
    peak = measurement.peak
    print(f"{case}: {peak.peak_allocated_bytes:,} in {peak.name}")


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
