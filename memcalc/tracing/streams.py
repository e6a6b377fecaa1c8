"""CUDA streams that are none: work is always done, only memory knows which stream it was taken for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any


class FakeStream:
    """A queue of work that is always done."""

    def __init__(self, number: int) -> None:
        self.number = number

    def wait_event(self, event: FakeEvent) -> None:
        """Nothing is ever behind."""

    def wait_stream(self, stream: FakeStream) -> None:
        """Nothing is ever behind."""

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        """An event that has happened."""
        return event or FakeEvent()

    def synchronize(self) -> None:
        """Nothing is ever behind."""


class FakeEvent:
    """A moment that has passed."""

    def record(self, _: FakeStream | None = None) -> FakeEvent:
        """Itself, as in torch.cuda."""
        return self

    def wait(self, _: FakeStream | None = None) -> None:
        """It has happened."""

    def query(self) -> bool:
        """It has happened."""
        return True

    def synchronize(self) -> None:
        """It has happened."""


class Streams:
    """What torch.cuda offers to those who shard: streams, events, and which device is the current one."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._current = FakeStream(0)

    @property
    def number(self) -> int:
        """Of the current stream; 0 is the default one."""
        return self._current.number

    def Stream(self, *_: Any, **__: Any) -> FakeStream:  # noqa: N802 -- torch.cuda's name
        """A new stream."""
        return FakeStream(next(self._numbers))

    def Event(self, *_: Any, **__: Any) -> FakeEvent:  # noqa: N802 -- torch.cuda's name
        """A new event."""
        return FakeEvent()

    def current_stream(self, *_: Any) -> FakeStream:
        """The stream that work goes to."""
        return self._current

    @contextmanager
    def stream(self, stream: FakeStream | None) -> Iterator[None]:
        """Work inside goes to that stream."""
        before = self._current
        self._current = stream or before
        try:
            yield
        finally:
            self._current = before

    def current_device(self) -> int:
        """There is one."""
        return 0

    def set_device(self, *_: Any) -> None:
        """There is one."""

    def device_count(self) -> int:
        """There is one."""
        return 1

    def is_initialized(self) -> bool:
        """Always."""
        return True

    def is_available(self) -> bool:
        """Always."""
        return True
