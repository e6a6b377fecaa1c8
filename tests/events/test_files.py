"""Event streams written and read again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.errors import InputError
from memcalc.events import Event, EventType, EventWriter, read_events, write_events
from memcalc.ledger.component import Component
from tests.properties.specs import examples

STREAM = [
    Event(EventType.PHASE, phase="forward_1"),
    Event(EventType.ALLOC, 7, 4096),
    Event(EventType.RECORD_STREAM, 7, stream=1),
    Event(
        EventType.ALLOC,
        8,
        12,
        1,
        Component.ACTIVATIONS,
        "forward_1",
        "layers.0",
        "aten.mm",
        (2, 3),
        "bf16",
        "model.py:12",
        5,
    ),
    Event(EventType.FREE, 7),
    Event(EventType.FREE_COMPLETED, 7),
    Event(EventType.EMPTY_CACHE),
    Event(EventType.OOM, bytes=2**40),
]

TEXTS = st.text(max_size=5)
EVENTS = st.builds(
    Event,
    kind=st.sampled_from(EventType),
    storage=st.integers(-1, 2**40),
    bytes=st.integers(0, 2**50),
    stream=st.integers(0, 2**48),
    component=st.none() | st.sampled_from(Component),
    phase=TEXTS,
    module=TEXTS,
    operator=TEXTS,
    shape=st.lists(st.integers(0, 2**40), max_size=3).map(tuple),
    dtype=TEXTS,
    line=TEXTS,
    time_us=st.none() | st.integers(0, 2**60),
)


def test_the_format_is_what_the_docstring_shows(tmp_path: Path) -> None:
    """One array a line, defaults at its end left out."""
    write_events(tmp_path / "run.jsonl", STREAM)

    head, *lines = (tmp_path / "run.jsonl").read_text().splitlines()
    columns = "kind storage bytes stream component phase module operator shape dtype line time_us".split()
    assert json.loads(head) == {"format": "memcalc-events", "version": 1, "columns": columns}
    assert lines == [
        '["phase",-1,0,0,null,"forward_1"]',
        '["alloc",7,4096]',
        '["record_stream",7,0,1]',
        '["alloc",8,12,1,"activations","forward_1","layers.0","aten.mm",[2,3],"bf16","model.py:12",5]',
        '["free",7]',
        '["free_completed",7]',
        '["empty_cache"]',
        '["oom",-1,1099511627776]',
    ]


@examples(60)
@given(st.lists(EVENTS, max_size=20))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, events: list[Event]) -> None:
    path = tmp_path_factory.mktemp("events") / "run.jsonl"
    write_events(path, events)

    read = list(read_events(path))

    assert read == events
    assert all(event.kind is EventType(event.kind) for event in read)  # replay compares kinds by identity
    assert all(event.component is None or isinstance(event.component, Component) for event in read)


def test_events_can_be_read_while_they_are_written(tmp_path: Path) -> None:
    """What was appended is in the file at once: a killed run leaves it behind."""
    path = tmp_path / "run.jsonl"
    with EventWriter(path) as writer:
        writer.append(STREAM[:3])
        assert list(read_events(path)) == STREAM[:3]
        writer.append(STREAM[3:])

    assert list(read_events(path)) == STREAM


def test_a_line_cut_off_at_the_end_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write_events(path, STREAM)
    path.write_text(path.read_text()[:-5])

    assert list(read_events(path)) == STREAM[:-1]


def test_columns_are_found_by_name(tmp_path: Path) -> None:
    """A file may have fewer columns, in another order, or some that this memcalc does not know."""
    path = tmp_path / "run.jsonl"
    path.write_text(
        '{"format":"memcalc-events","version":1,"columns":["bytes","color","kind","storage","component"]}\n'
        '[64,"red","alloc",3,"weights"]\n'
        '[0,"red","free",3]\n'
    )

    assert list(read_events(path)) == [
        Event(EventType.ALLOC, 3, 64, component=Component.WEIGHTS),
        Event(EventType.FREE, 3),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "run.jsonl:1: this is not a file of memcalc events. Its first line would be"),
        ("{}\n", "run.jsonl:1: this is not a file of memcalc events."),
        ("[1]\n", "run.jsonl:1: this is not a file of memcalc events."),
        ("kind,storage\n", "run.jsonl:1: this is not a file of memcalc events."),
        (
            '{"format":"memcalc-events","version":2,"columns":[]}\n',
            "run.jsonl:1: events of version 2; this memcalc reads up to version 1. Upgrade memcalc",
        ),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text)

    with pytest.raises(InputError) as error:
        list(read_events(path))

    assert message in str(error.value)


@pytest.mark.parametrize(
    "line", ['["born",1]', "nonsense", "[]", "7", '["alloc",1,2,0,"weightz"]', '["free"' + ",1" * 20]
)
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "run.jsonl"
    write_events(path, STREAM[:2])
    with path.open("a") as file:
        file.write(f"{line}\n")

    with pytest.raises(InputError, match=r"run\.jsonl:4: this line is not an event .* Each line is an array"):
        list(read_events(path))
