"""Run the cases of dry_runs.yaml on the null device, and append their memory to benchmarks/recordings/dry-runs.

    python benchmarks/dry_runs.py scripts --python hf=ENV/bin/python --python more=ENV/bin/python --checkouts FOLDER

The environments are made as the file says; the checkouts are the repositories that its links name, each in a directory
of its name. A case with `arguments` finds them as {data}/CASE/arguments.json, and the config of its `preset` beside
them. A case with an unnamed environment is omitted; a case that is recorded already is run again only if
it is named with --case.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from benchmarks.synthetic import make
from memcalc.api import load
from memcalc.nullcuda import DryRun, run
from memcalc.nullcuda.result import DONE, STOPPED
from memcalc.spec.model_families.inverse import write_hf_config

HERE = Path(__file__).resolve().parent
RECORDINGS = HERE / "recordings" / "dry-runs"
TIMEOUT = 2400  # seconds, where a case says nothing

LOOK = """
import json, sysconfig, sys
from importlib.metadata import version
versions = {name: version(name) for name in sys.argv[1:]}
print(json.dumps([sysconfig.get_path("purelib"), sys.version.split()[0], versions]))
"""


def main() -> None:
    """Parse the command line, then run what is to be run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("group", help="a list in dry_runs.yaml")
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH", help="of an environment")
    parser.add_argument("--checkouts", type=Path, default=Path(), help="folder of repositories")
    parser.add_argument("--case", action="append", help="run this one only, recorded or not")
    arguments = parser.parse_args()
    pythons = dict(pair.split("=", 1) for pair in arguments.python)
    record = RECORDINGS / f"{arguments.group}.jsonl"
    known, wanted = read(record), arguments.case or []
    with tempfile.TemporaryDirectory(prefix="memcalc-synthetic-") as data:
        make(Path(data))
        for case in yaml.safe_load((HERE / "dry_runs.yaml").read_text())[arguments.group]:
            name = case["case"]
            if case["environment"] not in pythons or (name not in wanted if wanted else name in known):
                continue
            found = run_case(case, pythons[case["environment"]], Path(data), arguments.checkouts.resolve())
            print(name, found["outcome"], found["seconds"], flush=True)
            lines = read(record) | {name: found}  # others may have written meanwhile
            record.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines.values()))


def read(record: Path) -> dict[str, dict[str, Any]]:
    """The records of a group, by case; none if there is no file."""
    lines = record.read_text().splitlines() if record.exists() else []
    return {line["case"]: line for line in map(json.loads, lines)}


def run_case(case: Mapping[str, Any], python: str, data: Path, checkouts: Path) -> dict[str, Any]:
    """One case; what it prints goes to standard error."""
    binaries = Path(python).absolute().parent
    look = subprocess.run([python, "-c", LOOK, *case["packages"]], capture_output=True, text=True, check=True)
    site, python_version, versions = json.loads(look.stdout)
    places = {"bin": str(binaries), "site": site, "here": str(HERE), "data": str(data), "checkouts": str(checkouts)}
    folder = Path(case.get("folder", str(data)).format(**places))
    if "arguments" in case:
        write_arguments(data / case["case"], case)
    variables = {name: str(value) for name, value in case.get("variables", {}).items()}
    path = f"{binaries}{os.pathsep}{os.environ['PATH']}"
    os.environ.update(variables | {"PATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})
    os.chdir(folder)
    try:
        found = run(
            shlex.split(case["command"].format(**places)),
            case["card"],
            gpus=case.get("gpus", 1),
            timeout=case.get("timeout", TIMEOUT),
            stdout=sys.stderr.fileno(),
            **case["options"],
        )
    finally:
        for name in variables:
            del os.environ[name]
    return {
        "case": case["case"],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": case["command"],
        "variables": variables,
        "card": case["card"],
        "gpus": case.get("gpus", 1),
        "options": case["options"],
        "versions": {"python": python_version, **versions},
        **outcome(found),
    }


def write_arguments(folder: Path, case: Mapping[str, Any]) -> None:
    """The case's arguments, and its model as transformers would have it."""
    folder.mkdir(exist_ok=True)
    (folder / "arguments.json").write_text(json.dumps(case["arguments"]))
    spec = load(case["preset"], *case.get("settings", ()))
    (folder / "config.json").write_text(json.dumps(write_hf_config(spec.model)))


def outcome(found: DryRun) -> dict[str, Any]:
    """Return the memory of the run in bytes."""
    return {
        "outcome": found.outcome,
        "good": found.outcome in {DONE, STOPPED},
        "verdict": found.answer,
        "doubt": found.doubt,
        "seconds": round(found.seconds, 1),
        "failures": [list(process.failure) for process in found.processes if process.failure is not None],
        "ranks": [
            {
                "rank": usage.rank,
                "device": usage.device,
                "steps": process.steps,
                "allocated_bytes": usage.allocated_bytes,
                "reserved_bytes": usage.reserved_bytes,
                "device_bytes": usage.device_bytes,
                "communication_bytes": usage.communication_bytes,
                "small_reads": process.small_reads,
            }
            for process in found.processes
            for usage in process.usages
        ],
    }


if __name__ == "__main__":
    main()
