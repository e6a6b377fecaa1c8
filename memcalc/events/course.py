"""The course of memory over a run: what pictures and tables of a stream are made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from memcalc.events.event import Event
from memcalc.events.notebook import Line, notebook
from memcalc.events.outline import Outline, Span, near, outline, spans
from memcalc.events.timeline import Timeline


@dataclass(frozen=True)
class Course:
    """A stream with its sums, and what an allocator made of it where one was asked.

    Args:
        timeline: the stream.
        allocated: bytes that the allocator had handed out after each event (`History.allocated`); fewer than events
            where the run died. None: nobody asked one, and the bytes asked for stand in.
        reserved: likewise, what it held of the device.
        limit: bytes that the device has for the allocator.
    """

    timeline: Timeline
    allocated: Sequence[int] | None = None
    reserved: Sequence[int] | None = None
    limit: int | None = None

    @property
    def totals(self) -> Sequence[int]:
        """Bytes allocated after each event, as far as the run came."""
        return self.timeline.totals if self.allocated is None else self.allocated

    @property
    def failed(self) -> bool:
        """Whether the run died before its last event."""
        return len(self.totals) < len(self.timeline.events)

    @cached_property
    def peak_bytes(self) -> int:
        """The most that was allocated at once."""
        return max(self.totals, default=0)

    @cached_property
    def top(self) -> int:
        """The highest value that a picture must have room for, as in every outline."""
        value = max(self.peak_bytes, max(self.reserved or (), default=0))
        return max(value, near(self.limit, value) or 0)

    @cached_property
    def peak_event(self) -> int:
        """The position of the event after which that was so, the first of them; -1 for an empty stream."""
        return self.totals.index(self.peak_bytes) if self.totals else -1

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Where the phases lie."""
        return tuple(spans(self.timeline.events, len(self.totals)))

    def phase_of(self, event: int) -> str:
        """The phase that an event belongs to; "" before the first one."""
        return next((span.phase for span in reversed(self.spans) if span.begin <= event), "")

    def alive_at_peak(self) -> list[Event]:
        """The allocations alive at the peak, in the order in which they were made."""
        return self.timeline.alive(self.peak_event)

    def outline(self, stretches: int) -> Outline:
        """The course in so many stretches, each told by its peak."""
        return outline(self.timeline, stretches, self.allocated, self.reserved, self.limit)

    def notebook(self) -> list[Line]:
        """One line for each phase."""
        return notebook(self.timeline, self.allocated)
