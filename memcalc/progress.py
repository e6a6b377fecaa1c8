"""Progress reports of long work: a callback, so that only the reports deal with terminals.

`memcalc.report.progress` draws it, tests append the calls to a list, and `silent` ignores them.
"""

from __future__ import annotations

from typing import Protocol

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
