"""One horizontal bar of letters: where the memory goes, readable without colour."""

from __future__ import annotations

from collections.abc import Sequence


def letter_bar(parts: Sequence[tuple[str, int]], width: int) -> str:
    """The letters of `parts`, each as long as its share; what exists gets at least one letter if there is room.

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
    free = width - len(shown)  # one cell each is given; the rest goes by share
    cells = [1 + free * size // whole for _, size in shown]
    remainders = sorted(range(len(shown)), key=lambda i: -(free * shown[i][1] % whole))
    for i in remainders[: width - sum(cells)]:
        cells[i] += 1
    return "".join(mark * length for (mark, _), length in zip(shown, cells, strict=True))


def small_bar(size: int, largest: int, width: int) -> str:
    """A bar of one size against the largest."""
    return "#" * (round(width * size / largest) if largest > 0 else 0)
