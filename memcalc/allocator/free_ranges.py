"""Free address ranges, allocated first-fit."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise


class FreeRanges:
    """The free ranges of an address space, sorted by address, never adjacent."""

    def __init__(self, begin: int, end: int) -> None:
        self._whole = (begin, end)
        self._holes = [self._whole]

    def allocate(self, size: int) -> int | None:
        """Allocate `size` bytes from the lowest range that fits and return the address; None if none fits."""
        for at, (begin, end) in enumerate(self._holes):
            if end - begin >= size:
                self._holes[at : at + 1] = [(begin + size, end)] if begin + size < end else []
                return begin
        return None

    def free(self, address: int, size: int) -> None:
        """Free a range."""
        begin, end = address, address + size
        at = bisect_left(self._holes, (begin, 0))
        if at < len(self._holes) and self._holes[at][0] == end:
            end = self._holes.pop(at)[1]
        if at and self._holes[at - 1][1] == begin:
            at -= 1
            begin = self._holes.pop(at)[0]
        self._holes.insert(at, (begin, end))

    @property
    def largest(self) -> int:
        """Bytes of the largest free range."""
        return max((end - begin for begin, end in self._holes), default=0)

    @property
    def is_whole(self) -> bool:
        """Whether the whole address space is free."""
        return self._holes == [self._whole]

    def check(self) -> None:
        """Assert the invariant: ranges are sorted and not adjacent."""
        assert all(left[1] < right[0] for left, right in pairwise(self._holes))
