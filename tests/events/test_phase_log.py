"""The run as a lab notebook."""

from memcalc.events import Event, EventType, timeline
from memcalc.events.memory_curve import PhaseLogLine, phase_log

RUN = [
    Event(EventType.ALLOC, 1, 7),  # 7, before any phase
    Event(EventType.PHASE, phase="model"),
    Event(EventType.ALLOC, 2, 100),  # 107
    Event(EventType.PHASE, phase="forward_1"),
    Event(EventType.ALLOC, 3, 50),  # 157
    Event(EventType.ALLOC, 4, 30),  # 187
    Event(EventType.FREE, 4),  # 157
    Event(EventType.PHASE, phase="backward_1"),
    Event(EventType.FREE, 3),  # 107
    Event(EventType.ALLOC, 5, 40),  # 147
    Event(EventType.PHASE, phase="forward_1"),
]


def test_each_phase_with_what_it_left() -> None:
    assert phase_log(timeline(RUN)) == [
        PhaseLogLine("baseline", 1, 7, 7, 7, 0),
        PhaseLogLine("model", 1, 107, 100, 107, 2),
        PhaseLogLine("forward_1", 1, 157, 50, 187, 5),
        PhaseLogLine("backward_1", 1, 147, -10, 157, 7),  # its peak is its first one
        PhaseLogLine("forward_1", 2, 147, 0, 147, 10),
    ]


def test_changes_sum_to_the_end() -> None:
    lines = phase_log(timeline(RUN))

    assert sum(line.change for line in lines) == lines[-1].end == timeline(RUN).totals[-1]


def test_in_blocks_of_an_allocator() -> None:
    """Each request takes a block of 512."""
    lines = phase_log(timeline(RUN), [512, 512, 1024, 1024, 1536, 2048, 1536, 1536, 1024, 1536, 1536])

    assert [(line.end, line.change, line.peak) for line in lines] == [
        (512, 512, 512),
        (1024, 512, 1024),
        (1536, 512, 2048),
        (1536, 0, 1536),
        (1536, 0, 1536),
    ]


def test_a_run_that_died_in_forward() -> None:
    lines = phase_log(timeline(RUN), [512, 512, 1024, 1024, 1536])

    assert lines[-1] == PhaseLogLine("forward_1", 1, 1536, 512, 1536, 4)


def test_a_run_that_began_with_nothing() -> None:
    assert phase_log(timeline([])) == [PhaseLogLine("baseline", 1, 0, 0, 0, -1)]
    assert phase_log(timeline(RUN[3:4]))[0] == PhaseLogLine("baseline", 1, 0, 0, 0, -1)


def test_a_run_without_phases_is_all_baseline() -> None:
    assert phase_log(timeline(RUN[4:6])) == [PhaseLogLine("baseline", 1, 80, 80, 80, 1)]
