"""How long work tells how far it has come: a callback, so that nothing below the reports knows of terminals.

`memcalc.report.progress` draws it; a test appends the calls to a list; `silent` is for nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

T = TypeVar("T")

EVERY = 4096  # items between two calls: what a call costs is lost among so many


class Progress(Protocol):
    """Called as often as the work likes; whoever draws it leaves calls out that come too soon."""

    def __call__(self, what: str, done: int, total: int | None = None) -> None:
        """`done` of `total` steps of `what` are over; `total` is None where nobody knows it.

        `what` is in the words of the user ("forward_2", "allocator"). A new word begins a new piece of work; `done`
        never falls within one.
        """


def silent(what: str, done: int, total: int | None = None) -> None:
    """Progress that nobody watches."""


def counted(items: Iterable[T], what: str, progress: Progress, total: int | None = None) -> Iterator[T]:
    """The items, with a call before the first, after every EVERY of them, and after the last."""
    progress(what, 0, total)
    number = 0
    for number, item in enumerate(items, start=1):
        yield item
        if number % EVERY == 0:
            progress(what, number, total)
    if number % EVERY or not number:
        progress(what, number, total)
