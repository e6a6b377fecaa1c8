"""Size each recorded program from its own file, beside what the dry run held.

    python -m benchmarks.programs.compare [FAMILY ...] [--seed development] [--unnamed] [--notes] [--write FILE]

Errors are (estimate - dry run) / dry run, in percent, of the rank that holds most. `--unnamed` gives neither the
framework nor the releases. Exit code 1: a run could not be sized. Run it from the repository's root.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.programs.record import read_records, record_path
from benchmarks.programs.registry import FAMILIES
from memcalc.api import estimate
from memcalc.errors import InputError, Unavailable
from memcalc.spec.origin import Assumption
from memcalc.spec.programs import VersionsSpec

UNDER = -2.0  # percent: an estimate that is lower than this promises too much
MIB = 2**20
# Programs that pad what they are given: of texts that are all long, none is padded, which the file cannot know.
DATA_DECIDE = ("sft", "accelerate")
# Programs that evaluate before their first step, and again after more steps than a record has.
EVALUATE_BEFORE = ("litgpt",)
# Scripts that free the model's outputs with the line that makes them, which their configs do not say.
SCRIPTS = ("accelerate", "deepspeed")
# Frameworks with launchers that set the allocator: memcalc assumes it, but a recorded command shows what was set.
LAUNCHED = ("torchtitan",)
ALLOCATOR = re.compile(r"\bPYTORCH_ALLOC_CONF=(\S+)")
# A line that compiles the model, which memcalc's own description of the program does not know.
COMPILES = re.compile(r"^\s*model = torch\.compile\(model", re.MULTILINE)
FREES_OUTPUTS = re.compile(r"\)\.loss$", re.MULTILINE)
PACKED = re.compile(r"^packing: true", re.MULTILINE)
SINGLE = re.compile(r"^per_device_train_batch_size: 1$", re.MULTILINE)


class Line(NamedTuple):
    """One program, sized.

    Args:
        record: of its dry run.
        allocated: bytes, by the estimate; 0: it could not be sized.
        reserved: the same for reserved memory.
        assumed: what memcalc assumed.
        phase: of the estimate's peak.
        verdict: of the estimate.
        problem: why it could not be sized.
    """

    record: Mapping[str, Any]
    allocated: int = 0
    reserved: int = 0
    assumed: tuple[str, ...] = ()
    phase: str = ""
    verdict: str | None = None
    problem: str = ""

    @property
    def allocated_error(self) -> float:
        """Percent."""
        return percent(self.allocated, peak(self.record, "allocated_bytes"))

    @property
    def reserved_error(self) -> float:
        """Percent."""
        return percent(self.reserved, peak(self.record, "reserved_bytes"))


def main() -> None:
    """Parse the command line, size, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", nargs="*", help="default: all that are recorded")
    parser.add_argument("--seed", default="development")
    parser.add_argument("--number", type=int, action="append", help="only this program")
    parser.add_argument("--unnamed", action="store_true", help="name neither the framework nor the releases")
    parser.add_argument("--notes", action="store_true", help="print what memcalc assumed, and its notes")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="to find a cause")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the summary as a Markdown table")
    given = parser.parse_args()
    wanted = given.family or [name for name in FAMILIES if record_path(name, given.seed).exists()]
    found: dict[str, list[Line]] = {}
    for name in wanted:
        records = [
            r for r in read_records(record_path(name, given.seed)) if r["number"] in (given.number or [r["number"]])
        ]
        print(f"\n{name}: allocated MiB, error, reserved MiB, error")
        found[name] = []
        for record in records:
            began = time.monotonic()
            sizable = record["good"] or ran_out(record)
            line = sized(record, named=not given.unnamed, more=given.set) if sizable else failed(record)
            found[name].append(line)
            print(shown(line, time.monotonic() - began), flush=True)
            if given.notes:
                print("".join(f"        {note}\n" for note in line.assumed), end="")
    table = summary(found)
    print("\n" + "\n".join(table))
    if given.write:
        given.write.write_text("\n".join(table) + "\n")
    sys.exit(int(any(line.problem for lines in found.values() for line in lines if line.record["good"])))


def sized(record: Mapping[str, Any], *, named: bool, more: Sequence[str] = (), replay: bool = True) -> Line:
    """The estimate of a recorded program, from its own file.

    Args:
        record: the program.
        named: whether the framework and its releases are given, too.
        more: further overrides.
        replay: whether the allocator is replayed; else reserved memory is 0 and there is no verdict.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_files(record, folder)
        try:
            result = estimate(
                Path(folder, record["sized"]["file"]), *settings(record, named=named), *more, gpu=record["card"]
            )
            result = result.replayed if replay else result
            reserved = max(rank.reserved_bytes or 0 for rank in result.ranks) if replay else 0
        except (InputError, Unavailable) as error:
            return Line(record, problem=str(error))
    # Of all stages of a pipeline, as of a record's ranks: the one that reserves most may not allocate most.
    ledger = max((rank.ledger for rank in result.ranks), key=lambda ledger: ledger.peak_bytes)
    origin = result.spec.origin
    assumed = tuple(map(assumption, origin.assumptions)) + origin.notes
    verdict = result.verdict if replay else None
    return Line(record, ledger.peak_bytes, reserved, assumed, ledger.peak_phase, verdict)


def write_files(record: Mapping[str, Any], folder: str) -> None:
    """The program's own files, in a folder."""
    for name, text in record["files"].items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def assumption(found: Assumption) -> str:
    """What memcalc assumed, with the bytes it moves."""
    moved = f"{found.moved_bytes / MIB:.0f} MiB, {100 * found.share:.1f}%"
    return f"ASSUMED {found.field}: {found.choice}: {found.taken}; otherwise {found.otherwise}, {moved} less"


def settings(record: Mapping[str, Any], *, named: bool) -> tuple[str, ...]:
    """`--set` for what the file cannot know; and, where it is to be named, the program and its versions."""
    given = tuple(record["sized"]["settings"])
    if record["data"] == "texts":  # all long: every sequence is as long as the program lets it be
        given += ("variable_lengths=false",)
    packs = PACKED.search(file_of(record)) and not SINGLE.search(file_of(record))  # several texts in one row
    if record["data"] == "texts" and record["sized"]["framework"] in DATA_DECIDE and not packs:
        given += ("padding_mask=none",)
    if record["sized"]["framework"] in EVALUATE_BEFORE:
        given += ("evaluation_when=before",)
    if record["sized"]["framework"] in SCRIPTS and FREES_OUTPUTS.search(record["files"].get("train.py", "")):
        given += ("logits_until=loss",)
    if record["sized"]["framework"] in LAUNCHED:
        found = ALLOCATOR.search(record["command"])
        given += (f"training.alloc_conf={found[1] if found else ''}",)
    if COMPILES.search(record["files"].get("train.py", "")):
        given += ("compile=true",)
    if not named:
        return given
    releases = {name: record["versions"].get(name.replace("_", "-")) for name in VersionsSpec.model_fields}
    return (
        *given,
        f"training.framework={record['sized']['framework']}",
        *(f"training.versions.{name}={release}" for name, release in releases.items() if release),
    )


def file_of(record: Mapping[str, Any]) -> str:
    """The text of the file that is estimated."""
    return str(record["files"][record["sized"]["file"]])


def ran_out(record: Mapping[str, Any]) -> bool:
    """Whether the dry run ended because the GPU's memory was full: its peaks are no truth, its verdict is."""
    return bool(record["outcome"] == "out of memory")


def failed(record: Mapping[str, Any]) -> Line:
    """A program that did not come to its end, for another reason."""
    said = record["failure"] or [record["outcome"], ""]
    return Line(record, problem=f"not run: {said[0]}: {said[1]}")


def peak(record: Mapping[str, Any], key: str) -> int:
    """Of the rank that holds most. Bytes."""
    return max((int(rank[key]) for rank in record["ranks"]), default=0)


def percent(estimated: int, recorded: int) -> float:
    """The error of an estimate."""
    return math.nan if not estimated or not recorded else 100 * (estimated - recorded) / recorded


def shown(line: Line, seconds: float) -> str:
    """One program on one line."""
    record = line.record
    name = record["models"][0] if record["models"] else record["sized"]["framework"]
    head = f"  {record['number']:2} {name:38.38} {record['gpus']}x{record['card']:10}"
    if line.problem:
        return f"{head} {line.problem[:300]}"
    if ran_out(record):
        figures = f"allocated {line.allocated / MIB:.0f}, reserved {line.reserved / MIB:.0f}"
        return f"{head} out of memory; the estimate: {figures}, {line.verdict}"
    allocated, reserved = peak(record, "allocated_bytes"), peak(record, "reserved_bytes")
    figures = f"{allocated / MIB:9.0f} {line.allocated_error:+8.2f}% {reserved / MIB:9.0f} {line.reserved_error:+8.2f}%"
    return f"{head} {figures}  {line.phase} ({seconds:.1f} s)"


def summary(found: Mapping[str, Sequence[Line]]) -> list[str]:
    """A Markdown table: one row a family, and one for all."""
    rows = [(name, lines) for name, lines in found.items()]
    if len(rows) > 1:
        rows.append(("all", [line for lines in found.values() for line in lines]))
    head = (
        *("programs", "runs", "allocated: median", "p95", "lowest", "highest", f"over {-UNDER:.0f}% too low"),
        *("reserved: median", "p95", "out of memory: agreed", "not estimated", "not run"),
    )
    table = [f"| {' | '.join(head)} |", f"| --- |{' ---: |' * (len(head) - 1)}"]
    for name, lines in rows:
        full = [line for line in lines if ran_out(line.record)]
        done = [line for line in lines if line.record["good"] and not line.problem]
        errors = [line.allocated_error for line in done]
        cells = [
            name,
            str(len(lines)),
            *(f"{each:.2f}%" for each in middle_and_tail(errors)),
            *((f"{min(errors):+.2f}%", f"{max(errors):+.2f}%") if errors else ("-", "-")),
            str(sum(error < UNDER for error in errors)),
            *(f"{each:.2f}%" for each in middle_and_tail(line.reserved_error for line in done)),
            f"{sum(line.verdict == 'does-not-fit' for line in full)} of {len(full)}" if full else "-",
            str(sum(bool(line.problem) and line.record["good"] for line in lines)),
            str(sum(not line.record["good"] for line in lines) - len(full)),
        ]
        table.append(f"| {' | '.join(cells)} |")
    return table


def middle_and_tail(errors: Iterable[float]) -> tuple[float, float]:
    """The median and the 95th percentile (nearest rank) of errors without their sign."""
    sizes = sorted(abs(error) for error in errors)
    if not sizes:
        return math.nan, math.nan
    return statistics.median(sizes), sizes[math.ceil(0.95 * len(sizes)) - 1]


if __name__ == "__main__":
    main()
