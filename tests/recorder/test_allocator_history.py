"""A run that nobody watches takes its attributions from one that was watched, and took a few blocks more."""

from __future__ import annotations

from memcalc.events.event import Event, EventType
from memcalc.ledger.component import Component
from memcalc.recorder.allocator_history import attributed


def phase(name: str) -> Event:
    return Event(EventType.PHASE, phase=name)


def alloc(number: int, size: int, operator: str = "", component: Component | None = None) -> Event:
    return Event(EventType.ALLOC, number, size, component=component, operator=operator)


def free(number: int) -> Event:
    return Event(EventType.FREE, number)


def test_memory_of_the_instrumentation_is_ignored() -> None:
    """100, 200, 100 against 100, (100), 200, 100: the first of the two is the sum of gradients, or the second; the
    sizes that follow tell."""
    watched = [
        phase("backward_1"),
        alloc(0, 50, "mm", Component.GRADIENTS),
        alloc(1, 100, "sum out of place", Component.TEMPORARIES),
        alloc(2, 100, "mul", Component.TEMPORARIES),
        alloc(3, 200, "mm", Component.GRADIENTS),
    ]
    plain = [phase("backward_1"), alloc(7, 50), alloc(8, 100), free(8), alloc(9, 200)]
    found = attributed(plain, watched)

    assert [(event.kind, event.storage, event.bytes) for event in found] == [
        (event.kind, event.storage, event.bytes) for event in plain
    ]
    assert [event.operator for event in found if event.kind is EventType.ALLOC] == ["mm", "mul", "mm"]


def test_what_only_the_first_run_took_is_a_librarys_or_a_temporary() -> None:
    plain = [phase("forward_1"), alloc(0, 32), alloc(1, 64), free(1), alloc(2, 8)]
    found = attributed(plain, [phase("forward_1"), alloc(0, 8, "relu", Component.ACTIVATIONS)])

    assert [event.component for event in found if event.kind is EventType.ALLOC] == [
        Component.LIBRARY_WORKSPACE,
        Component.TEMPORARIES,
        Component.ACTIVATIONS,
    ]


def test_each_time_that_a_phase_runs_is_for_itself() -> None:
    """Two micro-batches: the first one's extra blocks do not shift the second's."""
    watched = [phase("loss_1"), alloc(0, 8, "a"), alloc(1, 8, "b"), phase("loss_1"), alloc(2, 8, "c")]
    plain = [phase("loss_1"), alloc(0, 8), phase("loss_1"), alloc(1, 8)]

    assert [event.operator for event in attributed(plain, watched) if event.kind is EventType.ALLOC] == ["a", "c"]
