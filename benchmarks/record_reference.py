"""Run the reference cases on the null CUDA device, or on a GPU, and append what they held to a file of recordings.

    python benchmarks/record_reference.py a100-80gb a100-80gb .venv-null/bin/python benchmarks/recordings/FILE.jsonl
    python benchmarks/record_reference.py a100-80gb cuda python3 benchmarks/recordings/gpu/new/FILE.jsonl

A list in reference_cases.yaml, a GPU (or `cuda`: this machine's GPU), an interpreter with PyTorch's CUDA build, and
where to. Cases with a record are skipped. Each case is a separate process, forked from one that has
imported torch but has not yet started CUDA, so that every allocator begins empty.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import yaml

from memcalc.errors import MemcalcError
from memcalc.measuring import measure
from memcalc.measuring.client import WORKER, Worker
from memcalc.nullcuda import environment
from memcalc.spec.loading import load

CASES = Path(__file__).with_name("reference_cases.yaml")


def main() -> None:
    """Run the cases of a list that have no record yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", help="a list in reference_cases.yaml")
    parser.add_argument("card", help="as in `memcalc gpus`; cuda: the GPU that is there")
    parser.add_argument("python", help="an interpreter whose torch is a CUDA build")
    parser.add_argument("recordings", type=Path, help="file that records are appended to")
    arguments = parser.parse_args()
    variables = variables_of(arguments.card, arguments.python)
    known = recorded(arguments.recordings)
    with Worker((arguments.python, *WORKER), variables) as worker:
        for case in yaml.safe_load(CASES.read_text())[arguments.cases]:
            if command(case) not in known:
                run(case, arguments.recordings, worker)


def variables_of(card: str, python: str) -> dict[str, str]:
    """The environment of the process that measures."""
    here = str(Path(__file__).parents[1])
    if card == "cuda":
        return {"PYTHONPATH": os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))}
    variables = environment(card, pythons=[python])
    variables["PYTHONPATH"] = os.pathsep.join(
        filter(None, (variables["PYTHONPATH"], here, os.environ.get("PYTHONPATH")))
    )
    return variables


def run(case: str, recordings: Path, worker: Worker) -> None:
    """Measure one case."""
    preset, *overrides = case.split()
    spec = load(preset, overrides)
    try:
        measurement = measure(spec, "cuda", steps=3, record=recordings, command=command(case), worker=worker)
    except MemcalcError as error:
        print(f"{case}: {type(error).__name__}: {error}", flush=True)
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
