"""The event stream: allocations and frees in order, independent of their source. Importing this loads no torch."""

from memcalc.events.event import Event, EventType
from memcalc.events.files import EventWriter, read_events, write_events
from memcalc.events.timeline import Timeline, timeline

__all__ = ["Event", "EventType", "EventWriter", "Timeline", "read_events", "timeline", "write_events"]
