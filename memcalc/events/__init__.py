"""The event stream: allocations and frees in order, independent of their source. Importing this loads no torch."""

from memcalc.events.event import Event, Kind
from memcalc.events.files import EventWriter, read_events, write_events
from memcalc.events.timeline import Timeline, timeline

__all__ = ["Event", "EventWriter", "Kind", "Timeline", "read_events", "timeline", "write_events"]
