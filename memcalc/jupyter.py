"""Results as the output of a notebook's cell. What writes them lies above the results, so it announces itself."""

from __future__ import annotations

from collections.abc import Callable

_writers: list[Callable[[object], str]] = []


class Displayed:
    """A result that notebooks show as HTML; everywhere else its `repr` is one line."""

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        """Return HTML without a script; None where nothing writes it, and the notebook shows the `repr`."""
        return _writers[-1](self) if _writers else None


def write_with(writer: Callable[[object], str]) -> None:
    """Let `writer` return the HTML of every result from now on."""
    _writers[:] = [writer]
