"""Conversion of a recording to an event stream, which any allocator can replay."""

from __future__ import annotations

from functools import partial

from memcalc.events.event import Event, EventType
from memcalc.snapshots.composition import Attribution, attribute
from memcalc.snapshots.frames import empties_cache, place
from memcalc.snapshots.initial_state import InitialState, beginning
from memcalc.snapshots.recording import DeviceRecording, Snapshot, SnapshotEntry

OPTIMIZER_STEP = "Optimizer.step"  # prefix of torch.profiler's annotations of optimizers


def events_of(
    snapshot: Snapshot, recording: DeviceRecording, start: InitialState | None = None, known: Attribution | None = None
) -> list[Event]:
    """Return the events of one device: its initial blocks, then its history.

    Steps are recognized by PyTorch's annotations of optimizers, if there are any. Emptying the cache because memory ran
    out is omitted, because another allocator may not need it.
    """
    known = known or attribute(snapshot, recording)
    return _Stream(snapshot, recording, start or beginning(recording), known).events()


_made = partial(tuple.__new__, Event)  # creates an event from all fields in half the time of its constructor
_NO_DETAILS = Event(EventType.FREE)[2:]


class _Stream:
    """Conversion of one history to events."""

    def __init__(self, snapshot: Snapshot, recording: DeviceRecording, start: InitialState, known: Attribution) -> None:
        self._snapshot = snapshot
        self._recording = recording
        self._start = start
        self._lines = [place(stack) for stack in snapshot.stacks]
        self._kinds = known.kinds
        handles = (
            {entry.stream for entry in recording.entries} | {held.stream for held in start.blocks_in_use.values()} | {0}
        )
        self._streams = {handle: number for number, handle in enumerate(sorted(handles))}  # 0 is the default stream
        marks = [annotation for annotation in recording.annotations if annotation.name.startswith(OPTIMIZER_STEP)]
        self._marks = marks[::-1]
        self._steps = 0
        self._in_use: dict[int, int] = {}  # address -> storage
        self._waiting: dict[int, int] = {}  # address -> storage that was freed, but that other streams may still use
        self._flushed = False
        self._events: list[Event] = []

    def events(self) -> list[Event]:
        """Return all events. Inlined, because the loop runs once per entry."""
        if self._marks:
            self._events.append(Event(EventType.PHASE, phase="step_1"))
        self._begin()
        in_use, waiting, append, alloc, free = (
            self._in_use,
            self._waiting,
            self._events.append,
            EventType.ALLOC,
            EventType.FREE,
        )
        kinds, lines, streams, marks = self._kinds, self._lines, self._streams, self._marks
        entries = self._recording.entries
        first = entries[0].time_us if entries else 0
        freed = None  # the storage of the previous event if that was a free: its completion needs no event
        for index, (action, address, size, stream, time, stack, _) in enumerate(entries):
            if marks and marks[-1].time_us <= time:
                self._phases(time)
            if action == "alloc":
                if self._flushed:
                    self._flush()
                in_use[address] = index
                freed = None
                after = time - first if time > first else 0
                details = (kinds[index], "", "", "", (), "", lines[stack], after)
                append(_made((alloc, index, size, streams[stream], *details)))
            elif action == "free_requested":
                if self._flushed:
                    self._flush()
                storage = in_use.pop(address, None)
                if storage is not None:
                    freed = waiting[address] = storage
                    append(_made((free, storage, *_NO_DETAILS)))
            elif action == "free_completed":
                storage = waiting.pop(address, None)
                if storage is not None and storage != freed:
                    append(Event(EventType.FREE_COMPLETED, storage))
                freed = None
            else:
                self._seldom(entries[index])
        self._flush()
        return self._events

    def _begin(self) -> None:
        """Add the blocks of the initial state."""
        for number, held in enumerate(sorted(self._start.blocks_in_use.values(), key=lambda held: held.address)):
            storage = -2 - number
            line = self._lines[held.stack]
            self._events.append(
                Event(EventType.ALLOC, storage, held.requested, self._streams[held.stream], line=line, time_us=0)
            )
            if held.is_waiting:  # freed before the history begins
                self._waiting[held.address] = storage
                self._events.append(Event(EventType.FREE, storage))
            else:
                self._in_use[held.address] = storage

    def _seldom(self, entry: SnapshotEntry) -> None:
        """Add the event of an entry that is neither an allocation nor a free."""
        if entry.action == "oom":
            self._events.append(Event(EventType.OOM, bytes=entry.size, stream=self._streams[entry.stream]))
        elif entry.action in ("segment_free", "segment_unmap"):
            self._flushed = self._flushed or empties_cache(self._snapshot, entry.stack)

    def _phases(self, time: int) -> None:
        """Add phase events for the marks up to a time."""
        while self._marks and self._marks[-1].time_us <= time:
            if self._marks.pop().stage == "START":
                self._steps += 1
                self._events.append(Event(EventType.PHASE, phase=f"optimizer_step_{self._steps}"))
            elif self._steps:
                self._events.append(Event(EventType.PHASE, phase=f"step_{self._steps + 1}"))

    def _flush(self) -> None:
        if self._flushed:
            self._events.append(Event(EventType.EMPTY_CACHE))
            self._flushed = False
