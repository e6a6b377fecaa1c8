"""Fake CUDA streams: work is always complete, and only allocations carry a stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any


class FakeStream:
    """A queue of work that is always complete."""

    def __init__(self, number: int) -> None:
        self.number = number

    def wait_event(self, event: FakeEvent) -> None:
        """Do nothing: work is complete."""

    def wait_stream(self, stream: FakeStream) -> None:
        """Do nothing: work is complete."""

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        """Return an event that has occurred."""
        return event or FakeEvent()

    def synchronize(self) -> None:
        """Do nothing: work is complete."""


class FakeEvent:
    """An event that has occurred."""

    def record(self, _: FakeStream | None = None) -> FakeEvent:
        """Return the event itself, as torch.cuda does."""
        return self

    def wait(self, _: FakeStream | None = None) -> None:
        """Do nothing: the event has occurred."""

    def query(self) -> bool:
        """Return True: the event has occurred."""
        return True

    def synchronize(self) -> None:
        """Do nothing: the event has occurred."""


class Streams:
    """The part of torch.cuda that sharding uses: streams, events, and the current device."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._current = FakeStream(0)

    @property
    def number(self) -> int:
        """Number of the current stream; 0 is the default stream."""
        return self._current.number

    def Stream(self, *_: Any, **__: Any) -> FakeStream:  # noqa: N802 -- torch.cuda's name
        """Return a new stream."""
        return FakeStream(next(self._numbers))

    def Event(self, *_: Any, **__: Any) -> FakeEvent:  # noqa: N802 -- torch.cuda's name
        """Return a new event."""
        return FakeEvent()

    def current_stream(self, *_: Any) -> FakeStream:
        """Return the current stream."""
        return self._current

    @contextmanager
    def stream(self, stream: FakeStream | None) -> Iterator[None]:
        """Make a stream the current one inside the context."""
        before = self._current
        self._current = stream or before
        try:
            yield
        finally:
            self._current = before

    def current_device(self) -> int:
        """Return 0, the only device."""
        return 0

    def set_device(self, *_: Any) -> None:
        """Do nothing: there is one device."""

    def device_count(self) -> int:
        """Return 1."""
        return 1

    def is_initialized(self) -> bool:
        """Return True."""
        return True

    def is_available(self) -> bool:
        """Return True."""
        return True
