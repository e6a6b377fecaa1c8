"""Records: one JSON line a run, appended whole and never changed.

A process can be killed in the middle of a write. What it leaves then is a line without its end: readers leave it out,
and whoever appends next takes it away first, since the run that it was of is not finished.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memcalc.errors import InputError
from memcalc.ledger.component import Component
from memcalc.ledger.ledger import Ledger
from memcalc.measuring.measurement import Measurement, as_values

RECORD_VERSION = 2  # 1 told components by tensors that could be named (`held`), 2 tells all of them

WORKSPACE = Component.LIBRARY_WORKSPACE.value

TAIL = 1 << 16  # bytes looked at for the end of the last whole line; lines may be longer


def to_record(measurement: Measurement) -> dict[str, Any]:
    """The line of a measurement."""
    ledger = measurement.result.ledger
    return {
        "record": RECORD_VERSION,
        "date": measurement.date,
        "command": measurement.command,
        "device": as_plain(measurement.device),
        "versions": measurement.versions,
        "allocator": measurement.allocator,
        "spec": measurement.spec.model_dump(mode="json"),
        "steps": measurement.steps,
        "phases": [as_values(phase) | {"components": _components(ledger, phase.name)} for phase in measurement.phases],
        "operators": by_operator(ledger, ledger.peak_phase),
        "parameters": measurement.parameters,
        "trainable": measurement.trainable,
        "buffers": measurement.buffers,
        "outcome": measurement.outcome,
        "message": measurement.message,
        "rank": measurement.rank,
        "ranks": measurement.ranks,
        "seconds": {part: round(each, 3) for part, each in measurement.seconds.items()},
    }


def by_operator(ledger: Ledger, phase: str) -> dict[str, int]:
    """Who had allocated what is alive in a phase's highest moment, most first; libraries' workspaces as one. Bytes."""
    found: dict[str, int] = {}
    for row in ledger.alive(phase):
        name = WORKSPACE if row.component is Component.LIBRARY_WORKSPACE else row.tensor
        found[name] = found.get(name, 0) + row.bytes
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def as_plain(value: Any) -> dict[str, Any]:
    """A dataclass as a mapping."""
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def _components(ledger: Ledger, phase: str) -> dict[str, int]:
    return {component.value: size for component, size in ledger.components(phase).items()}


def append(record: dict[str, Any], path: Path) -> None:
    """Add a record to a file; when this returns, it is on the disk."""
    append_all((record,), path)


def append_all(records: Iterable[dict[str, Any]], path: Path) -> None:
    """Add records that belong together, in one write; when this returns, they are on the disk.

    Runs that share a file wait for each other, so lines do not mix.
    """
    lines = (json.dumps(record, separators=(",", ":"), ensure_ascii=False) + "\n" for record in records)
    rest = "".join(lines).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        with locked(descriptor):
            _take_away_half_line(descriptor)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file, in order; a last line that was cut off in writing is left out.

    Raises:
        InputError: with file and line, where a whole line is no record.
    """
    if not path.exists():
        return
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith("\n"):
                return
            try:
                found = json.loads(line)
                known = found["record"] <= RECORD_VERSION
            except (ValueError, TypeError, KeyError) as error:
                raise InputError(
                    "this line is no record of a measured run.", "Name a file that `measure` wrote.", f"{path}:{number}"
                ) from error
            if not known:
                raise InputError(f"a record of version {found['record']}.", "Upgrade memcalc.", f"{path}:{number}")
            yield found


@contextmanager
def locked(descriptor: int) -> Iterator[None]:
    """Alone with a file, where the system has such locks; the lock goes with the process that holds it."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _take_away_half_line(descriptor: int) -> None:
    """Cut the file after its last line end; whole lines are never touched."""
    size = end = os.lseek(descriptor, 0, os.SEEK_END)
    while end > 0:
        begin = max(0, end - TAIL)
        os.lseek(descriptor, begin, os.SEEK_SET)
        found = os.read(descriptor, end - begin).rfind(b"\n")
        if found >= 0:
            end = begin + found + 1
            break
        end = begin
    if end < size:
        os.ftruncate(descriptor, end)
