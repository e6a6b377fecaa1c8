"""Sources of events: a file of events, a memory snapshot of a run, or a configuration to trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from memcalc.errors import InputError
from memcalc.events.event import Event
from memcalc.events.files import FORMAT, read_events
from memcalc.files import is_file, open_file
from memcalc.progress import Progress, silent
from memcalc.snapshots.composition import Attribution, attribute
from memcalc.snapshots.initial_state import InitialState
from memcalc.snapshots.recording import DeviceRecording, Snapshot
from memcalc.spec.spec import Spec

_PICKLES = (".pickle", ".pkl", ".pickle.gz", ".pkl.gz")
_PICKLED = (b"\x80", b"\x1f\x8b")  # first bytes of pickles since protocol 2, and of gzip files


class SnapshotDevice(NamedTuple):
    """One device of a snapshot."""

    snapshot: Snapshot  # the file
    recording: DeviceRecording  # the device's segments and history
    start: InitialState  # the state before the history
    attribution: Attribution  # component and step of each entry


@dataclass(frozen=True, slots=True)
class EventSource:
    """A run's events, and the snapshot that they were read from."""

    name: str  # of the file or configuration
    source_type: Literal["events", "snapshot", "trace"]  # "events", "snapshot" or "trace"
    events: Sequence[Event]  # in order
    recorded: SnapshotDevice | None = None  # the device of the snapshot; None for other sources
    gpu: str | None = None  # the GPU in the configuration


def open_source(
    path: Path | str | None, load: Callable[[], Spec], device: int | None = None, progress: Progress = silent
) -> EventSource:
    """Return the events of a file, or those of a configuration's training step.

    Args:
        path: the file, or a configuration's name; None: a configuration that is not a file.
        load: reads the configuration, if `path` is neither events nor a snapshot.
        device: the index of the device in a snapshot; None: the only one, or the one with the longest history.
        progress: called with the progress of a trace.

    Raises:
        InputError: for a file that is neither, or a device that the snapshot does not have.
    """
    kind = "config" if path is None else kind_of(Path(path))
    if path is not None and kind == "snapshot":
        return _snapshot(Path(path), device)
    if device is not None:
        raise InputError(
            f"--device {device} is given, but {path or 'the source'} is not a memory snapshot.", "Leave --device out."
        )
    if path is not None and kind == "events":
        return EventSource(Path(path).name, "events", tuple(read_events(path)))
    return _traced(load(), progress)


def kind_of(path: Path) -> Literal["events", "snapshot", "config"]:
    """Return the type of a file by its first bytes; a path that is not a file is a configuration's name."""
    if not is_file(path):
        return "snapshot" if path.name.endswith(_PICKLES) else "config"
    with open_file(path) as file:
        head = file.read(100)
    if head.startswith(_PICKLED) or path.name.endswith(_PICKLES):
        return "snapshot"
    return "events" if FORMAT.encode() in head or path.suffix == ".jsonl" else "config"


def _snapshot(path: Path, device: int | None) -> EventSource:
    from memcalc.snapshots.reading import read_snapshot

    snapshot = read_snapshot(path)
    known = {recording.device: recording for recording in snapshot.recordings}
    if not known:
        raise InputError(
            "the snapshot has no segments and no history.",
            "Call torch.cuda.memory._record_memory_history() before the run allocates anything.",
            str(path),
        )
    if device is None:
        device = max(known, key=lambda number: (len(known[number].entries), -number))
    if device not in known:
        raise InputError(
            f"the snapshot has no device {device}.", f"Choose from {', '.join(map(str, known))}.", str(path)
        )
    recording = known[device]
    return source_of(path.name, snapshot, recording)


def source_of(name: str, snapshot: Snapshot, recording: DeviceRecording) -> EventSource:
    """Return the events of one device of a snapshot."""
    from memcalc.snapshots.initial_state import beginning
    from memcalc.snapshots.stream import events_of

    recorded = SnapshotDevice(snapshot, recording, beginning(recording), attribute(snapshot, recording))
    return EventSource(name, "snapshot", events_of(*recorded), recorded)


def _traced(spec: Spec, progress: Progress) -> EventSource:
    """Trace a training step and return its events; the only function here that depends on the tracer."""
    from memcalc.tracing import trace

    return EventSource(spec.name, "trace", trace(spec, progress=progress).events, gpu=spec.hardware.gpu)
