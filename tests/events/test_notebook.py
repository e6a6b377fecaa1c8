"""The run as a lab notebook."""

from memcalc.events import Event, Kind, timeline
from memcalc.events.notebook import Line, notebook

RUN = [
    Event(Kind.ALLOC, 1, 7),  # 7, before any phase
    Event(Kind.PHASE, phase="model"),
    Event(Kind.ALLOC, 2, 100),  # 107
    Event(Kind.PHASE, phase="forward_1"),
    Event(Kind.ALLOC, 3, 50),  # 157
    Event(Kind.ALLOC, 4, 30),  # 187
    Event(Kind.FREE, 4),  # 157
    Event(Kind.PHASE, phase="backward_1"),
    Event(Kind.FREE, 3),  # 107
    Event(Kind.ALLOC, 5, 40),  # 147
    Event(Kind.PHASE, phase="forward_1"),
]


def test_each_phase_with_what_it_left() -> None:
    assert notebook(timeline(RUN)) == [
        Line("baseline", 1, 7, 7, 7, 0),
        Line("model", 1, 107, 100, 107, 2),
        Line("forward_1", 1, 157, 50, 187, 5),
        Line("backward_1", 1, 147, -10, 157, 7),  # its peak is its first one
        Line("forward_1", 2, 147, 0, 147, 10),
    ]


def test_changes_sum_to_the_end() -> None:
    lines = notebook(timeline(RUN))

    assert sum(line.change for line in lines) == lines[-1].end == timeline(RUN).totals[-1]


def test_in_blocks_of_an_allocator() -> None:
    """Each request takes a block of 512."""
    lines = notebook(timeline(RUN), [512, 512, 1024, 1024, 1536, 2048, 1536, 1536, 1024, 1536, 1536])

    assert [(line.end, line.change, line.peak) for line in lines] == [
        (512, 512, 512),
        (1024, 512, 1024),
        (1536, 512, 2048),
        (1536, 0, 1536),
        (1536, 0, 1536),
    ]


def test_a_run_that_died_in_forward() -> None:
    lines = notebook(timeline(RUN), [512, 512, 1024, 1024, 1536])

    assert lines[-1] == Line("forward_1", 1, 1536, 512, 1536, 4)


def test_a_run_that_began_with_nothing() -> None:
    assert notebook(timeline([])) == [Line("baseline", 1, 0, 0, 0, -1)]
    assert notebook(timeline(RUN[3:4]))[0] == Line("baseline", 1, 0, 0, 0, -1)


def test_a_run_without_phases_is_all_baseline() -> None:
    assert notebook(timeline(RUN[4:6])) == [Line("baseline", 1, 80, 80, 80, 1)]
