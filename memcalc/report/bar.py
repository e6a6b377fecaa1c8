"""Horizontal bar of letters, one per component, readable without color."""

from __future__ import annotations

from collections.abc import Sequence

BAR_MARK = "#"


def letter_bar(parts: Sequence[tuple[str, int]], width: int) -> str:
    """Return the letters of `parts` in proportion to their sizes; at least one per part if there is room.

    The cells are dealt by largest remainder, so that they always fill the width.
    """
    shown = [(mark, size) for mark, size in parts if size > 0]
    whole = sum(size for _, size in shown)
    if not whole or width <= 0:
        return ""
    if len(shown) > width:
        largest = sorted(range(len(shown)), key=lambda i: -shown[i][1])[:width]
        shown = [shown[i] for i in sorted(largest)]
        whole = sum(size for _, size in shown)
    free = width - len(shown)  # one cell each; the rest in proportion
    cells = [1 + free * size // whole for _, size in shown]
    remainders = sorted(range(len(shown)), key=lambda i: -(free * shown[i][1] % whole))
    for i in remainders[: width - sum(cells)]:
        cells[i] += 1
    return "".join(mark * length for (mark, _), length in zip(shown, cells, strict=True))


def small_bar(size: int, largest: int, width: int) -> str:
    """Return a bar of one size relative to the largest."""
    return BAR_MARK * (round(width * size / largest) if largest > 0 else 0)
