"""The recorded runs of docs/dry-run-scripts.md again, as far as torch and transformers are all they need."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from memcalc.nullcuda import run

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
QUICK = "fsdp2-8"


def recorded() -> list[Any]:
    """Those of one process: with several, the one or other holds a bucket longer."""
    found: list[Any] = []
    for group in ("single", "ranks"):
        listed = {case["case"]: case for case in yaml.safe_load((BENCHMARKS / "dry_runs.yaml").read_text())[group]}
        for line in (BENCHMARKS / "recordings" / "dry-runs" / f"{group}.jsonl").read_text().splitlines():
            record = json.loads(line)
            if set(listed[record["case"]]["packages"]) <= {"torch", "transformers"} and record["gpus"] == 1:
                marks = [] if record["case"] == QUICK else [pytest.mark.long]
                found.append(pytest.param(record, id=record["case"], marks=marks))
    return found


@pytest.mark.parametrize("record", recorded())
def test_a_recorded_run_comes_out_the_same(record: dict[str, Any], dry_run_here: Path, null_python: str) -> None:
    """To the byte, with the same versions."""
    versions = {name: version for name, version in record["versions"].items() if name != "python"}
    asks = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    installed = subprocess.run([null_python, "-c", asks, *versions], capture_output=True, text=True, check=False)
    if installed.stdout.split() != list(versions.values()):
        pytest.skip(f"recorded with {versions}")
    places = {"bin": str(Path(null_python).parent), "here": str(BENCHMARKS)}

    found = run(shlex.split(record["command"].format(**places)), record["card"], **record["options"])

    assert found.outcome == record["outcome"]
    assert found.allocated_bytes == record["ranks"][0]["allocated_bytes"]
