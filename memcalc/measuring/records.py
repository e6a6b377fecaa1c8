"""Records: one JSON line a run, appended whole and never changed.

A process can be killed in the middle of a write. What it leaves then is a line without its end: readers leave it out,
and whoever appends next takes it away first, since the run that it was of is not finished. Nothing else is ever taken
away: a whole record without its line break stays, and a file that holds something else is refused.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from memcalc.errors import InputError, NotWritten
from memcalc.files import kind_of, open_file
from memcalc.ledger.component import Component
from memcalc.ledger.ledger import Ledger
from memcalc.measuring.measurement import Measurement, as_values

RECORD_VERSION = 2  # 1 told components by tensors that could be named (`held`), 2 tells all of them

WORKSPACE = Component.LIBRARY_WORKSPACE.value

TAIL = 1 << 16  # bytes looked at for the end of the last whole line; lines may be longer
LONGEST_RECORD = 1 << 26  # bytes of a line; the records of the largest runs have some 10^5
BEGINNING = b'{"record":'  # of every line, whoever wrote it; the number of a version follows
PATIENCE = 20.0  # seconds to wait for whoever else writes, which takes milliseconds

_KEPT_ELSEWHERE = "The result is printed, but not kept: free space, or name another --record."


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
    """Who had allocated what is alive at a phase's peak, most first; libraries' workspaces as one. Bytes."""
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

    Raises:
        NotWritten: the disk is full, or the file holds something other than records by now. It is as it was before.
    """
    lines = (json.dumps(record, separators=(",", ":"), ensure_ascii=False) + "\n" for record in records)
    content = "".join(lines).encode("utf-8", "backslashreplace")  # lone surrogates, as JSON writes them
    try:
        path.resolve().parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError as error:
        raise NotWritten(str(path), error.strerror or str(error), _KEPT_ELSEWHERE) from None
    try:
        with locked(descriptor):
            _write(descriptor, content)
    except InputError as error:
        raise NotWritten(str(path), error.problem.rstrip("."), _KEPT_ELSEWHERE) from None
    except OSError as error:
        raise NotWritten(str(path), error.strerror or str(error), _KEPT_ELSEWHERE) from None
    finally:
        os.close(descriptor)


def check_records(path: Path) -> None:
    """Refuse a file that records cannot be appended to, before anything is measured for it.

    Raises:
        InputError: it holds something other than records, or cannot be written.
    """
    remedy = "Name a file that `measure` wrote, or a new one."
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        parent = next(folder for folder in path.resolve().parents if folder.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            raise InputError(f"no file can be made in {parent}.", remedy, f"--record {path}") from None
        return
    except OSError as error:
        raise InputError(f"cannot be used: {error.strerror}.", remedy, f"--record {path}") from None
    if not stat.S_ISREG(mode) and not stat.S_ISCHR(mode):  # /dev/null keeps nothing, by request
        raise InputError(f"is {kind_of(mode)}, not a file.", remedy, f"--record {path}")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND)
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}.", remedy, f"--record {path}") from None
    try:
        if stat.S_ISREG(mode):
            with locked(descriptor):
                _tail(descriptor)
    except InputError as error:
        raise InputError(error.problem, remedy, f"--record {path}") from None
    finally:
        os.close(descriptor)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file, in order; a last line that was cut off in writing is left out.

    Raises:
        InputError: with file and line, where a whole line is no record, or the file cannot be read.
    """
    if not path.exists():
        return
    with open_file(path, "Name a file that `measure` wrote.") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(LONGEST_RECORD + 1), b""), start=1):
            found = _record(line)
            if not line.endswith(b"\n") and (found is None or "record" not in found):
                if _may_be_cut(line):
                    return
                found = None
            version = None if found is None else found.get("record")
            if found is None or type(version) is not int:
                raise InputError(
                    "this line is not a record of a measured run.",
                    "Name a file that `measure` wrote.",
                    f"{path}:{number}",
                )
            if version > RECORD_VERSION:
                raise InputError(f"a record of version {version}.", "Upgrade memcalc.", f"{path}:{number}")
            yield found


def read_measured(path: Path) -> Iterator[dict[str, Any]]:
    """The records of measured runs of a file, in order, each with the parts that readers ask for.

    Raises:
        InputError: as `read`; or a line lacks a part, or holds something else in its place.
    """
    for number, record in enumerate(read(path), start=1):
        wrong = next(filter(None, (_wrong(record, part, kind) for part, kind in _PARTS.items())), None)
        if wrong is None and not record["phases"]:
            wrong = "phases"
        wrong = wrong or _wrong_size(record) or _wrong_size(record["device"])
        for phase in record["phases"] if wrong is None else ():
            wrong = wrong or _wrong(phase, "name", str) or _wrong(phase, "peak_allocated_bytes", int)
            wrong = wrong or _wrong_size(phase)
            if wrong is None and "components" in phase and not _are_sizes(phase["components"]):
                wrong = "components"
        if wrong is not None:
            raise InputError(
                f"this line is not a record of a measured run: {wrong} is missing or wrong.",
                "Name a file that `measure` wrote.",
                f"{path}:{number}",
            )
        yield record


# What a record of a measured run has, by the path of each part.
_PARTS: dict[str, type] = {
    "command": str,
    "device": dict,
    "device.kind": str,
    "device.name": str,
    "device.identifier": str,
    "versions": dict,
    "versions.torch": str,
    "allocator": str,
    "spec": dict,
    "phases": list,
    "parameters": int,
    "buffers": int,
    "outcome": str,
}
_KINDS = {kind.value for kind in Component}


def _wrong(record: Any, part: str, kind: type) -> str | None:
    """The part where it is not of this type; None where it is."""
    value = record
    for name in part.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return None if isinstance(value, kind) and not (kind is int and isinstance(value, bool)) else part


def _wrong_size(values: dict[str, Any]) -> str | None:
    """The first value that is called bytes and is neither a whole number nor unknown."""
    sizes = (name for name in values if name.endswith("_bytes"))
    return next((name for name in sizes if values[name] is not None and type(values[name]) is not int), None)


def _are_sizes(components: Any) -> bool:
    return isinstance(components, dict) and all(
        name in _KINDS and type(size) is int for name, size in components.items()
    )


@contextmanager
def locked(descriptor: int) -> Iterator[None]:
    """Alone with a file, where the system has such locks; the lock goes with the process that holds it.

    Raises:
        InputError: another process holds it, and does not let go.
    """
    try:
        import fcntl

        until = time.monotonic() + PATIENCE
        while not _taken(descriptor):
            if time.monotonic() > until:
                raise InputError(f"is locked by another process, for {PATIENCE:.0f} seconds by now.")
            time.sleep(0.01)
    except (ImportError, OSError):  # Windows; a file system without locks
        yield
        return
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _taken(descriptor: int) -> bool:
    """Whether the lock could be had at once."""
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write(descriptor: int, content: bytes) -> None:
    """Append whole lines; what cannot be written whole is taken back.

    Raises:
        InputError: the file holds something other than records.
        OSError: the disk is full.
    """
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        _write_all(descriptor, content)
        return
    end, whole = _tail(descriptor)
    if end < os.fstat(descriptor).st_size:
        os.ftruncate(descriptor, end)
    try:
        _write_all(descriptor, content if whole else b"\n" + content)
        os.fsync(descriptor)
    except OSError:
        with suppress(OSError):
            os.ftruncate(descriptor, end)
        raise


def _write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


def _tail(descriptor: int) -> tuple[int, bool]:
    """Where the next record may begin: after all that is worth keeping, and whether that ends with a line break.

    What follows the last line break is kept if it is a record, and cut away if it begins like one.

    Raises:
        InputError: the file holds something other than records.
    """
    size = os.fstat(descriptor).st_size
    if size and not _begins_like_a_record(os.pread(descriptor, TAIL, 0)):
        raise InputError("holds something other than records.")
    end = _last_line_break(descriptor, size)
    if end == size:
        return size, True
    if size - end > LONGEST_RECORD:
        raise InputError("ends in a line that is longer than any record.")
    rest = os.pread(descriptor, size - end, end)
    if (found := _record(rest)) is not None and type(found.get("record")) is int:
        return size, False
    if not _may_be_cut(rest):
        raise InputError("ends in something other than a record.")
    return end, True


def _last_line_break(descriptor: int, size: int) -> int:
    """The place after the last line break; 0 where there is none; not looked for beyond the longest record."""
    end = size
    while end > 0 and size - end <= LONGEST_RECORD:
        begin = max(0, end - TAIL)
        found = os.pread(descriptor, end - begin, begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return end


def _begins_like_a_record(text: bytes) -> bool:
    """Whether a line may be (the beginning of) a record, by its first letters: other writers put blanks there."""
    squeezed = b"".join(text.split())
    if squeezed.startswith(BEGINNING):
        version = squeezed[len(BEGINNING) :]
        return not version or version[:1].isdigit()
    return BEGINNING.startswith(squeezed)


def _may_be_cut(rest: bytes) -> bool:
    """Whether the end of a file is a record that was cut off: it begins like one, and no JSON ends in it.

    A whole record that something follows in the same line is not: a file that others have put together.
    """
    if not _begins_like_a_record(rest):
        return False
    try:
        json.JSONDecoder().raw_decode(rest.decode("utf-8", "replace").lstrip())
    except (ValueError, RecursionError):
        return True
    return False


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
