"""Progress reports of long work: a callback, so that only the reports deal with terminals.

`memcalc.report.progress` draws it, tests append the calls to a list, and `silent` ignores them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

T = TypeVar("T")

EVERY = 4096  # items between two calls, enough to make the cost of a call negligible


class Progress(Protocol):
    """Callback for progress. It may be called at any rate; the drawing side skips calls that come too soon."""

    def __call__(self, what: str, done: int, total: int | None = None) -> None:
        """Report that `done` of `total` steps of `what` are finished; `total` is None if unknown.

        `what` is a label for the user ("forward_2", "allocator"). A new label begins a new piece of work; `done` never
        decreases within one.
        """


def silent(what: str, done: int, total: int | None = None) -> None:
    """Ignore progress."""


def counted(items: Iterable[T], what: str, progress: Progress, total: int | None = None) -> Iterator[T]:
    """Yield the items; report progress before the first item, after every `EVERY` items, and after the last."""
    progress(what, 0, total)
    number = 0
    for number, item in enumerate(items, start=1):
        yield item
        if number % EVERY == 0:
            progress(what, number, total)
    if number % EVERY or not number:
        progress(what, number, total)
