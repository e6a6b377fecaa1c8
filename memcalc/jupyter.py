"""HTML of results in notebooks. The writer is in a layer above the results, so it registers itself here."""

from __future__ import annotations

from collections.abc import Callable

_writers: list[Callable[[object], str]] = []


class NotebookDisplay:
    """A result that notebooks display as HTML; elsewhere its `repr` is one line."""

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        """Return HTML without a script; None if no writer is registered, and the notebook displays the `repr`."""
        return _writers[-1](self) if _writers else None


def write_with(writer: Callable[[object], str]) -> None:
    """Register the function that returns the HTML of every result."""
    _writers[:] = [writer]
