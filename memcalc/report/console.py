"""The console that reports are drawn on."""

from __future__ import annotations

from rich.console import Console


class _Output(Console):
    def on_broken_pipe(self) -> None:
        # Rich would end the program with 1, which means "does not fit"; the program has a code for this.
        raise BrokenPipeError


def make_console() -> Console:
    """Standard output: a terminal's own width, else 80 columns. Markup is off: names may hold square brackets."""
    return _Output(markup=False, emoji=False, highlight=False)
