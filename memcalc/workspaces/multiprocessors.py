"""What kernels ask a card before they decide how to run."""

from __future__ import annotations

from typing import NamedTuple


class Multiprocessors(NamedTuple):
    """A card's multiprocessors.

    Args:
        count: how many there are.
        threads: that one can hold: 2048 on A100 and H100, 1536 on consumer cards.
        major: compute capability.
    """

    count: int  # type: ignore[assignment] # hides tuple.count, which no card needs
    threads: int
    major: int = 8
