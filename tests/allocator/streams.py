"""Random streams of events."""

from __future__ import annotations

from hypothesis import strategies as st

from memcalc.events import Event, EventType
from tests.allocator.running import MIB

# (what happens, which of the living storages, bytes, stream); what a step has no use for is ignored
STEP = st.tuples(
    st.sampled_from(["alloc"] * 5 + ["free"] * 4 + ["phase", "record_stream", "empty_cache"]),
    st.integers(0, 2**16),
    st.one_of(st.integers(1, MIB), st.integers(MIB, 12 * MIB), st.integers(10 * MIB, 120 * MIB), st.integers(1, 100)),
    st.sampled_from([0, 0, 0, 1]),
)
OPERATORS = ("aten.mm", "aten.relu", "aten.add.Tensor", "")


@st.composite
def event_streams(draw: st.DrawFn, streams: bool = False) -> list[Event]:
    """Whole streams: whatever is freed was allocated before; with the rarer events where `streams` is set."""
    events: list[Event] = []
    living: list[int] = []
    phases = 0
    for number, (kind, which, size, stream) in enumerate(draw(st.lists(STEP, min_size=10, max_size=80))):
        if kind == "alloc":
            living.append(number)
            events.append(
                Event(
                    EventType.ALLOC, number, size, stream if streams else 0, operator=OPERATORS[which % len(OPERATORS)]
                )
            )
        elif kind == "free" and living:
            events.append(Event(EventType.FREE, living.pop(which % len(living))))
        elif kind == "phase":
            phases += 1
            events.append(Event(EventType.PHASE, phase=f"forward_{phases}"))
        elif kind == "record_stream" and streams and living:
            events.append(Event(EventType.RECORD_STREAM, living[which % len(living)], stream=stream))
        elif kind == "empty_cache" and streams:
            events.append(Event(EventType.EMPTY_CACHE))
    return events
