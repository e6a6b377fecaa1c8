"""Requests played to PyTorch's allocator: how high each phase rises, and what is reserved for it."""

from __future__ import annotations

from collections.abc import Iterable

from memcalc.allocator.blocks import Block
from memcalc.allocator.driver import Driver
from memcalc.allocator.pytorch.caching import CachingAllocator
from memcalc.allocator.pytorch.settings import parse_settings
from memcalc.allocator.pytorch.versions import DEFAULT_VERSION, parse_version
from memcalc.estimation.allocation import rounded
from memcalc.estimation.estimate import Played
from memcalc.workspaces import Script


class Requests:
    """Storages with their owners. A storage is a number; it is freed when its last owner lets it go.

    Args:
        alloc_conf: as PYTORCH_CUDA_ALLOC_CONF.
        torch: the release of PyTorch whose allocator it is, such as "2.13".
        room: bytes that the allocator can have of the device; None: of a device that never runs out.

    Raises:
        InputError: the release does not take these settings.
        OutOfMemory: by what plays a request that the room has no place for.
    """

    def __init__(self, alloc_conf: str = "", torch: str = DEFAULT_VERSION, room: int | None = None) -> None:
        version = parse_version(torch)
        self._allocator = CachingAllocator(parse_settings(alloc_conf, version), version, Driver(room))
        self._blocks: list[tuple[Block, ...]] = []  # of each storage
        self._asked_of: list[int] = []  # bytes of each storage, rounded up to blocks
        self._owners: list[int] = []
        self._asked = self._allocated = 0  # bytes now: rounded up to blocks, and with the rests that are not split off
        self._phase = ""
        self._tops: dict[str, tuple[int, int]] = {}

    def begin(self, phase: str) -> None:
        """What follows is in this phase."""
        self._phase = phase
        self._look()

    def take(self, size: int) -> int:
        """A new storage with one owner."""
        return self.play((size,))

    def play(self, script: Script) -> int:
        """Buffers taken and given back inside an operator: those left over are one storage with one owner."""
        taken: list[tuple[int, Block]] = []
        for change in script:
            if change > 0:
                block = self._allocator.malloc(change)
                taken.append((change, block))
                self._count(block.size, rounded(change))
            elif change:  # the newest of that size
                last = max(index for index, (size, _) in enumerate(taken) if size == -change)
                _, block = taken.pop(last)
                self._count(-block.size, -rounded(-change))
                self._allocator.free(block)
        self._blocks.append(tuple(block for _, block in taken))
        self._asked_of.append(sum(rounded(size) for size, _ in taken))
        self._owners.append(1)
        return len(self._owners) - 1

    def hold(self, number: int) -> None:
        """One more owner."""
        self._owners[number] += 1

    def drop(self, numbers: Iterable[int]) -> None:
        """One owner less of each."""
        for number in numbers:
            self._owners[number] -= 1
            if self._owners[number]:
                continue
            for block in self._blocks[number]:
                self._allocated -= block.size
                self._allocator.free(block)
            self._asked -= self._asked_of[number]

    @property
    def rests(self) -> dict[str, int]:
        """For each phase how much higher it rises than it would if every rest were split off."""
        return {phase: whole - asked for phase, (whole, asked) in self._tops.items()}

    @property
    def played(self) -> Played:
        """What the allocator adds to what is asked for."""
        return Played(self.rests, self.reserved_bytes)

    @property
    def asked(self) -> dict[str, int]:
        """For each phase the most that is asked for at once, rounded up to blocks."""
        return {phase: asked for phase, (_, asked) in self._tops.items()}

    @property
    def reserved_bytes(self) -> int:
        """The most that the allocator has held of the device."""
        return self._allocator.statistics()["reserved_bytes.all.peak"]

    def _count(self, allocated: int, asked: int) -> None:
        self._allocated += allocated
        self._asked += asked
        self._look()

    def _look(self) -> None:
        whole, asked = self._tops.get(self._phase, (0, 0))
        self._tops[self._phase] = max(whole, self._allocated), max(asked, self._asked)
