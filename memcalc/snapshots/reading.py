"""Reader of snapshot files, which are unpickled in a separate process."""

from __future__ import annotations

import marshal
import subprocess
import sys
from pathlib import Path
from typing import Any

from memcalc.errors import InputError
from memcalc.files import open_file
from memcalc.snapshots import worker
from memcalc.snapshots.columns import entries_of
from memcalc.snapshots.recording import (
    Annotation,
    DeviceRecording,
    RecordedBlock,
    RecordedSegment,
    Snapshot,
    StackFrame,
)

PATIENCE = 120  # seconds; a million events take a few


def read_snapshot(path: Path | str) -> Snapshot:
    """Read a file of torch.cuda.memory._dump_snapshot, of torch 2.1 or later; nothing in it is executed.

    Raises:
        InputError: for any other file, with the reason, or one that cannot be read.
    """
    with open_file(path, "Name a file of torch.cuda.memory._dump_snapshot."):
        pass  # a missing file, or a pipe, raises a separate error
    command = [sys.executable, "-I", worker.__file__, str(path)]
    try:
        done = subprocess.run(  # noqa: S603 - our own program
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        raise _refused(path, f"reading it takes more than {PATIENCE} seconds") from None
    if done.returncode == worker.REFUSED:
        raise _refused(path, done.stdout.decode(errors="replace"))
    if done.returncode != worker.OK:
        raise _refused(path, "it makes Python's pickle reader fail")
    return unpacked(marshal.loads(done.stdout))  # noqa: S302 - written by our own process


def _refused(path: Path | str, why: str) -> InputError:
    return InputError(
        f"this is not a memory snapshot: {why}.",
        "Write one with torch.cuda.memory._dump_snapshot, after torch.cuda.memory._record_memory_history().",
        str(path),
    )


def unpacked(packed: dict[str, Any]) -> Snapshot:
    """Return the snapshot from the tuples of `packing.pack`."""
    traces = packed["traces"]
    devices = sorted({i for i, trace in enumerate(traces) if trace[0]} | {row[0] for row in packed["segments"]})
    return Snapshot(
        recordings=tuple(_recording(device, traces, packed) for device in devices),
        stacks=tuple(tuple(StackFrame(*frame) for frame in stack) for stack in packed["stacks"]),
        settings=packed["settings"],
        keys=frozenset(packed["keys"]),
        lacks=packed["lacks"],
    )


def _recording(device: int, traces: tuple[Any, ...], packed: dict[str, Any]) -> DeviceRecording:
    segments = [
        RecordedSegment._make((*row[1:-1], tuple(map(RecordedBlock._make, row[-1]))))
        for row in packed["segments"]
        if row[0] == device
    ]
    annotations = [Annotation(*row[:3]) for row in packed["annotations"] if row[3] == device]
    return DeviceRecording(
        device=device,
        entries=entries_of(traces[device]) if device < len(traces) else (),
        segments=tuple(sorted(segments)),
        annotations=tuple(sorted(annotations, key=lambda annotation: annotation.time_us)),
        is_cut="device_traces" in packed["lacks"] and device >= len(traces) - 1,
    )
