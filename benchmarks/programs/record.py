"""Draw programs, dry-run each on the null device, and append what it held to benchmarks/recordings/programs.

    python -m benchmarks.programs.record FAMILY ... --environments FOLDER [--seed development] [--count 8]

Each environment is a folder of FOLDER with the name that benchmarks/programs/environments.py gives it. A program that
is recorded already is run again only if its number is named with --number, or if it failed, with --failed. Run it from
the repository's root.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.programs.checkpoints import make_checkpoint
from benchmarks.programs.data import make_data, make_model
from benchmarks.programs.program import Environment, Family, Program
from benchmarks.programs.registry import FAMILIES
from memcalc.documents.dry_run import dry_run_document
from memcalc.nullcuda import DryRun, run
from memcalc.nullcuda.options import Options
from memcalc.nullcuda.result import WHOLE

RECORDINGS = Path(__file__).parents[1] / "recordings" / "programs"
MOST_LINES = 14  # of the program, at the peak
LAST = 15  # lines of the output of a program that failed

# Folders of this machine before a path that means something elsewhere, then any other.
_NAME = r"/[^\s\"',:;()\[\]]*"
PLACES = re.compile(
    rf"{_NAME}/site-packages/|{_NAME}/(?=Megatron-LM/)|{_NAME}/lib/python3\.\d+/|{_NAME}/(?=compiled/)"
    rf"|(?<![\w.])/(?:tmp|root|work|home){_NAME}/"
)

LOOK = """
import json, platform, sys
from importlib.metadata import PackageNotFoundError, version
def found(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return None
print(json.dumps({"python": platform.python_version(), **{name: found(name) for name in sys.argv[1:]}}))
"""


def main() -> None:
    """Parse the command line, then run what is to be run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", nargs="*", choices=[*FAMILIES, []], help="default: all whose environment is there")
    parser.add_argument("--environments", type=Path, required=True, help="folder of virtual environments")
    parser.add_argument("--seed", default="development", help="of the draw; each has a file of its own")
    parser.add_argument("--count", type=int, default=8, help="programs of each family")
    parser.add_argument("--number", type=int, action="append", help="run this one, recorded or not")
    parser.add_argument("--failed", action="store_true", help="run those again that are recorded as failed")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "memcalc-programs")
    given = parser.parse_args()
    for name in given.family or FAMILIES:
        family = FAMILIES[name]
        python = given.environments.resolve() / family.environment.name / "bin" / "python"
        if python.exists():
            known = {record["number"]: record["good"] for record in read_records(record_path(name, given.seed))}
            again = {number for number, good in known.items() if given.failed and not good}
            numbers = given.number or [n for n in range(given.count) if n not in known or n in again]
            record_family(family, python, given.seed, numbers, given.work)


def record_family(family: Family, python: Path, seed: str, numbers: Iterable[int], work: Path) -> None:
    """Run the programs of these numbers."""
    path = record_path(family.name, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    versions = look_up(family.environment, python)
    for number in numbers:
        program = family.program(seed, number)
        found = {
            "family": family.name,
            "seed": seed,
            "number": number,
            **described(program),
            "versions": versions,
            **without_places(run_program(program, python, work, f"{family.name}-{seed}-{number}")),
        }
        known = {record["number"]: record for record in read_records(path)} | {number: found}  # others may write, too
        path.write_text("".join(json.dumps(known[each], separators=(",", ":")) + "\n" for each in sorted(known)))
        print(family.name, number, found["outcome"], found["failure"], flush=True)


def record_path(family: str, seed: str) -> Path:
    """The file of a family's records of one seed."""
    return RECORDINGS / seed / f"{family}.jsonl"


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a file; none if there is none."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def look_up(environment: Environment, python: Path) -> dict[str, str | None]:
    """Releases of the packages that matter; None: not installed."""
    found = subprocess.run([python, "-c", LOOK, *environment.packages], capture_output=True, text=True, check=True)
    versions: dict[str, str | None] = json.loads(found.stdout)
    return versions | {"memcalc": version("llm-memcalc")}


def described(program: Program) -> dict[str, Any]:
    """The program as it is recorded."""
    return {
        "files": dict(program.files),
        "command": program.command,
        "card": program.card,
        "gpus": program.gpus,
        "options": dict(program.options),
        "models": list(program.models),
        "data": program.data,
        "sized": {
            "file": program.sized.file,
            "settings": list(program.sized.settings),
            "framework": program.sized.framework,
        },
    }


def run_program(program: Program, python: Path, work: Path, name: str) -> dict[str, Any]:
    """Run it in a directory of its own, with its data and models beside it."""
    folder = prepare(program, work, name, python)
    words = shlex.split(program.command)
    if (python.parent / words[0]).exists():
        words[0] = str(python.parent / words[0])
    before = dict(os.environ), Path.cwd()
    os.chdir(folder)
    os.environ.update(variables(python.parent))
    try:
        with printing_to(folder / "output.txt"):
            options: Options = {"history": True, **program.options}  # type: ignore[typeddict-item]
            found = run(words, program.card, gpus=program.gpus, timeout=program.timeout, **options)
    finally:
        os.chdir(before[1])
        os.environ.clear()
        os.environ.update(before[0])
    (folder / "record.json").write_text(json.dumps(dry_run_document(found), indent=1))
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **outcome(found),
        **({} if found.outcome in WHOLE else {"last_lines": last_lines(folder / "output.txt")}),
    }


@contextmanager
def printing_to(path: Path) -> Iterator[None]:
    """What this process and its children print goes to a file."""
    sys.stdout.flush()
    former = [(number, os.dup(number)) for number in (1, 2)]
    with path.open("w") as file:
        for number, _ in former:
            os.dup2(file.fileno(), number)
        try:
            yield
        finally:
            for number, copy in former:
                os.dup2(copy, number)
                os.close(copy)


def prepare(program: Program, work: Path, name: str, python: Path) -> Path:
    """The folder of a program: its files, and links to its data and models."""
    models, data, folder = work / "models", work / "data", work / "runs" / name
    if program.data and not (data / program.data / "train.jsonl").exists():
        make_data(data)
    folder.mkdir(parents=True, exist_ok=True)
    for hub_id in program.models:
        place = folder / hub_id
        link(place, make_model(models, hub_id))
        if program.checkpoint:
            made = make_checkpoint(program.checkpoint, work / "checkpoints", models, hub_id, python)
            link(folder / "checkpoints" / hub_id, made)
    if program.checkout:
        link(folder / program.checkout, work / "checkouts" / program.checkout)
    if program.data:
        link(folder / "data", data / program.data)
    for file, text in program.files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    return folder


def link(place: Path, target: Path) -> None:
    """A link that replaces an older one."""
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    place.symlink_to(target.resolve())


def variables(bin_folder: Path) -> dict[str, str]:
    """The environment: no network, no logging to services, caches of their own."""
    return {
        "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(Path.cwd() / "hub"),
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_MODE": "disabled",
        "DO_NOT_TRACK": "1",
        "AXOLOTL_DO_NOT_TRACK": "1",
        "OMP_NUM_THREADS": "1",
        **dict.fromkeys(("PET_MASTER_PORT", "DLTS_MASTER_PORT"), str(free_port())),  # of torchrun, of deepspeed
    }


def free_port() -> int:
    """A port of this host that nobody listens on, so that programs of several ranks can run side by side."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def outcome(found: DryRun) -> dict[str, Any]:
    """What is kept of a dry run. Bytes; of the lines that allocate at the peak, the largest."""
    peak, training = found.peak, [process for process in found.processes if process.usages]
    return {
        "outcome": found.outcome,
        "good": found.outcome in WHOLE and not found.doubt and all(process.steps for process in training),
        "exit_code": found.exit_code,
        "seconds": round(found.seconds, 1),
        "verdict": None if found.fits is None else "fits" if found.fits else "does-not-fit",
        "failure": next((list(process.failure) for process in found.processes if process.failure is not None), None),
        "warnings": list(found.warnings),
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
        "largest_at_peak": [
            {"where": each.location, "bytes": each.bytes, "count": each.count}
            for process in found.processes
            for each in sorted(process.allocations, key=lambda one: -one.bytes)
            if peak is not None and (each.process, each.device) == (peak.process, peak.device)
        ][:MOST_LINES],
    }


def without_places(value: Any) -> Any:
    """The same document; paths in it begin with their package or repository, not with where that lies here."""
    if isinstance(value, dict):
        return {key: without_places(each) for key, each in value.items()}
    if isinstance(value, list):
        return [without_places(each) for each in value]
    return PLACES.sub("", value) if isinstance(value, str) else value


def last_lines(path: Path) -> list[str]:
    """The end of what a program printed."""
    lines = path.read_text(errors="replace").splitlines()
    return [line[:300] for line in lines if line.strip()][-LAST:]


if __name__ == "__main__":
    main()
