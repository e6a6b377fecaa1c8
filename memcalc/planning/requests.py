"""Requests played to PyTorch's allocator: how high each phase rises, in bytes and in the rests that blocks keep."""

from __future__ import annotations

from collections.abc import Iterable

from memcalc.allocator.blocks import Block
from memcalc.allocator.pytorch.caching import CachingAllocator
from memcalc.estimation.allocation import SMALL_REQUEST, rounded


class Requests:
    """Storages with their owners, on a device that never runs out.

    A storage is a number; it is freed when its last owner lets it go.
    """

    def __init__(self) -> None:
        self._allocator = CachingAllocator()
        self._blocks: dict[int, Block] = {}
        self._owners: list[int] = []
        self._sizes: list[int] = []  # rounded up to blocks
        self._asked = self._kept = 0  # bytes now: rounded up to blocks, and of rests that are not split off
        self._phase = ""
        self._tops: dict[str, tuple[int, int]] = {}

    def begin(self, phase: str) -> None:
        """What follows is in this phase."""
        self._phase = phase
        self._look()

    def take(self, size: int) -> int:
        """A new storage with one owner."""
        self._owners.append(1)
        number = len(self._owners) - 1
        asked = rounded(size)
        self._sizes.append(asked)
        self._asked += asked
        if asked > SMALL_REQUEST:  # of small blocks every rest is split off
            block = self._blocks[number] = self._allocator.malloc(size)
            self._kept += block.size - asked
        self._look()
        return number

    def hold(self, number: int) -> None:
        """One more owner."""
        self._owners[number] += 1

    def drop(self, numbers: Iterable[int]) -> None:
        """One owner less of each."""
        for number in numbers:
            self._owners[number] -= 1
            if self._owners[number]:
                continue
            self._asked -= self._sizes[number]
            if number in self._blocks:
                block = self._blocks.pop(number)
                self._kept -= block.size - self._sizes[number]
                self._allocator.free(block)

    @property
    def rests(self) -> dict[str, int]:
        """For each phase how much higher it rises than it would if every rest were split off."""
        return {phase: whole - asked for phase, (whole, asked) in self._tops.items()}

    @property
    def asked(self) -> dict[str, int]:
        """For each phase the most that is asked for at once, rounded up to blocks."""
        return {phase: asked for phase, (_, asked) in self._tops.items()}

    def _look(self) -> None:
        whole, asked = self._tops.get(self._phase, (0, 0))
        self._tops[self._phase] = max(whole, self._asked + self._kept), max(asked, self._asked)
