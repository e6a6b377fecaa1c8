"""Chrome traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memcalc.events import Event, EventType, timeline
from memcalc.events.chrome import chrome_trace, write_chrome_trace
from memcalc.events.memory_curve import MemoryCurve
from memcalc.ledger.component import Component

WEIGHTS, ACTIVATIONS = Component.WEIGHTS, Component.ACTIVATIONS

RUN = [
    Event(EventType.PHASE, phase="model"),
    Event(EventType.ALLOC, 1, 100, component=WEIGHTS, phase="model", module="embed", operator="aten.empty"),
    Event(EventType.PHASE, phase="forward_1"),
    Event(
        EventType.ALLOC, 2, 50, 3, ACTIVATIONS, "forward_1", "layers.0", "aten.mm", (5, 5), "bf16", "model.py:12"
    ),
    Event(EventType.ALLOC, 3, 8, module="layers.0"),
    Event(EventType.FREE, 3),
    Event(EventType.ALLOC, 4, 30, component=ACTIVATIONS, module="layers.1"),
    Event(EventType.PHASE, phase="backward_1"),
    Event(EventType.FREE, 2),
]  # fmt: skip


def course(events: list[Event] = RUN) -> MemoryCurve:
    return MemoryCurve(timeline(events))


def of_kind(trace: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == kind]


def rows(trace: dict[str, Any], thread: str) -> list[tuple[str, int, int]]:
    """The durations of one thread."""
    (number,) = (event["tid"] for event in of_kind(trace, "M") if event["args"].get("name") == thread)
    return [(e["name"], e["ts"], e["dur"]) for e in of_kind(trace, "X") if e["tid"] == number]


def test_phases_steps_and_modules_are_durations() -> None:
    """A microsecond an event; a module lasts until its last allocation."""
    trace = chrome_trace(course(), "tiny")

    assert rows(trace, "phases") == [("model", 0, 2), ("forward_1", 2, 5), ("backward_1", 7, 2)]
    assert rows(trace, "steps") == [("step 1", 2, 7)]
    assert rows(trace, "modules") == [("embed", 1, 1), ("layers.0", 3, 2), ("layers.1", 6, 1)]


def test_components_are_counted_after_every_event() -> None:
    counters = of_kind(chrome_trace(course(), "tiny"), "C")

    assert {counter["name"] for counter in counters} == {"bytes by component"}
    assert [(c["ts"], *c["args"].values()) for c in counters] == [
        (0, 0, 0, 0),
        (1, 100, 0, 0),
        (2, 100, 0, 0),
        (3, 100, 50, 0),
        (4, 100, 50, 8),
        (5, 100, 50, 0),
        (6, 100, 80, 0),
        (7, 100, 80, 0),
        (8, 100, 30, 0),
    ]
    assert list(counters[0]["args"]) == ["weights", "activations", "unattributed"]


def test_reserved_bytes_are_a_counter_of_their_own() -> None:
    found = MemoryCurve(timeline(RUN[:2]), [0, 512], [0, 2048])
    counters = of_kind(chrome_trace(found, "tiny"), "C")

    assert [(c["name"], c["ts"], c["args"]) for c in counters[2:]] == [
        ("bytes by component", 1, {"weights": 100, "block_rounding": 412}),
        ("reserved bytes", 1, {"reserved": 2048}),
    ]


def test_allocations_tell_all_that_is_known() -> None:
    instants = of_kind(chrome_trace(course(), "tiny"), "i")

    assert [(i["name"], i["ts"], i["args"]["bytes"]) for i in instants] == [
        ("aten.empty", 1, 100),
        ("aten.mm", 3, 50),
        ("unattributed", 4, 8),
        ("activations", 6, 30),
    ]
    assert instants[1]["args"] == {
        "bytes": 50,
        "component": "activations",
        "phase": "forward_1",
        "module": "layers.0",
        "operator": "aten.mm",
        "dtype": "bf16",
        "line": "model.py:12",
        "shape": "[5, 5]",
        "stream": 3,
        "lived_us": 5,
    }
    assert "lived_us" not in instants[0]["args"]  # to the end of the run


def test_recorded_times_are_kept() -> None:
    timed = [event._replace(time_us=1000 * at) for at, event in enumerate(RUN)]
    trace = chrome_trace(course(timed), "tiny")

    assert rows(trace, "phases") == [("model", 0, 2000), ("forward_1", 2000, 5000), ("backward_1", 7000, 1001)]
    assert of_kind(trace, "i")[1]["args"]["lived_us"] == 5000
    assert trace["otherData"]["times"] == "recorded"
    assert chrome_trace(course(timed), "tiny", timed=False) == chrome_trace(course(), "tiny")


@pytest.mark.parametrize("times", [[None, 1, 2], [2, 1, 3], [1, 2, None]])
def test_times_with_gaps_or_leaps_are_not_used(times: list[int | None]) -> None:
    events = [event._replace(time_us=time) for event, time in zip(RUN, times, strict=False)]

    assert chrome_trace(course(events), "tiny")["otherData"]["times"] == "one microsecond per event"


def test_of_long_runs_the_largest_allocations_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of four allocations; three samples of nine, the peak of 180 among them."""
    monkeypatch.setattr("memcalc.events.chrome.INSTANTS", 2)
    monkeypatch.setattr("memcalc.events.chrome.SAMPLES", 3)
    trace = chrome_trace(course(), "tiny")

    assert [i["args"]["bytes"] for i in of_kind(trace, "i")] == [100, 50]
    assert max(sum(c["args"].values()) for c in of_kind(trace, "C")) == 180
    assert trace["otherData"] == {
        "events": 9,
        "counter_samples": 3,
        "allocations": 4,
        "allocations_shown": 2,
        "times": "one microsecond per event",
    }


def test_a_run_that_died_ends_where_it_died() -> None:
    trace = chrome_trace(MemoryCurve(timeline(RUN), [0, 512, 512, 1024]), "tiny")

    assert rows(trace, "phases") == [("model", 0, 2), ("forward_1", 2, 2)]
    assert len(of_kind(trace, "i")) == 2


def test_the_file_is_json_that_viewers_take(tmp_path: Path) -> None:
    """What the format asks of each kind of event; threads have names and an order."""
    write_chrome_trace(tmp_path / "run.json", course(), "tiny")
    trace = json.loads((tmp_path / "run.json").read_text())
    needed = {"M": {"args"}, "X": {"ts", "dur"}, "C": {"ts", "args"}, "i": {"ts", "s"}}

    assert trace["displayTimeUnit"] in {"ms", "ns"}
    for event in trace["traceEvents"]:
        assert {"ph", "pid", "tid", "name"} | needed[event["ph"]] <= set(event)
        assert event.get("dur", 0) >= 0
    for event in of_kind(trace, "C"):
        assert all(isinstance(value, int) for value in event["args"].values())
    assert {"name": "tiny"} in [event["args"] for event in of_kind(trace, "M")]


def test_nothing_happened() -> None:
    trace = chrome_trace(course([]), "tiny")

    assert {event["ph"] for event in trace["traceEvents"]} == {"M"}
