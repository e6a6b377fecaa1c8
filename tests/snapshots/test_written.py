"""Snapshots that memcalc itself has written, read again."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from memcalc.allocator import history
from memcalc.allocator.pytorch.dump import write_snapshot
from memcalc.events import Event, EventType
from memcalc.ledger.component import Component
from memcalc.snapshots.reading import read_snapshot
from memcalc.snapshots.stream import events_of
from tests.allocator.streams import event_streams
from tests.properties.specs import examples


def read_again(folder: Path, events: list[Event], config: str = "") -> list[Event]:
    write_snapshot(folder / "run.pickle", history(events, config))
    snapshot = read_snapshot(folder / "run.pickle")
    (recording,) = snapshot.recordings
    return events_of(snapshot, recording)


def told(events: list[Event]) -> list[tuple[EventType, int, int]]:
    """Allocations and frees; a flush is listed only if it freed anything."""
    return [
        (event.kind, event.bytes, event.stream) for event in events if event.kind in (EventType.ALLOC, EventType.FREE)
    ]


@examples(10)
@given(event_streams(), st.sampled_from(["", "expandable_segments:True"]))
def test_allocations_and_frees_come_back(tmp_path_factory, events: list[Event], config: str) -> None:
    again = read_again(tmp_path_factory.mktemp("written"), events, config)

    assert told(again) == told(events)
    assert history(again, config).result.segments == history(events, config).result.segments


def test_components_lines_and_flushes_come_back(tmp_path: Path) -> None:
    events = [
        Event(EventType.ALLOC, 1, 30 * 2**20, component=Component.GRADIENTS, operator="aten.mm", line="model.py:12"),
        Event(EventType.FREE, 1),
        Event(EventType.EMPTY_CACHE),
        Event(EventType.ALLOC, 2, 1000),
    ]
    again = read_again(tmp_path, events)

    assert [event.kind for event in again] == [event.kind for event in events]
    assert (again[0].component, again[0].line) == (Component.GRADIENTS, "model.py:12 aten.mm")
