"""A run's requests of PyTorch's allocator: written down first, then replayed.

What a step asks for does not depend on what it gets, so one list serves every setting, release and card.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from memcalc.allocator.pytorch.bound import most_reserved
from memcalc.allocator.pytorch.constants import STREAM_SHIFT
from memcalc.allocator.pytorch.lean import Highest
from memcalc.allocator.pytorch.scripted import Scripted, allocator_of
from memcalc.allocator.pytorch.versions import DEFAULT_VERSION
from memcalc.estimation.estimate import Played
from memcalc.ledger.component import Component
from memcalc.workspaces import Script


class Stretch(NamedTuple):
    """Requests of one phase, in order: as `LeanAllocator.play` takes them.

    Args:
        phase: its name.
        script: the requests.
        after_empty_cache: whether torch.cuda.empty_cache() comes before them.
    """

    phase: str
    script: list[int]
    after_empty_cache: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether it is neither a phase nor a request."""
        return not (self.phase or self.script)


class Written(NamedTuple):
    """Requests that may come again, with the storages that they make.

    Args:
        script: the requests, without those that are made once only.
        made: the storages that they make, one for each that is positive or zero.
        owners: how many each of these has in the end.
        parts: those of them that are not one block.
    """

    script: list[int]
    made: list[int]
    owners: list[int]
    parts: dict[int, tuple[int, ...]]


class Requests:
    """The list of requests, written storage by storage. A storage is freed when its last owner lets it go.

    A storage is a number: that of its request. One that has several blocks, or none, has its number of the last
    request for it, or of an empty one.

    `components` has what each storage is for. What no caller names is a buffer of the sharding engine.
    """

    def __init__(self) -> None:
        self.stretches: list[Stretch] = []
        self.components: list[Component] = []
        # A subclass that looks at every request sees each of them: then nothing is copied from what was written.
        self.repeats = type(self) is Requests
        self._script: list[int] = []
        self._owners: list[int] = []
        self._parts: dict[int, tuple[int, ...]] = {}  # of storages that are not one block: their requests
        self._once: set[int] = set()
        self.begin("")

    def begin(self, phase: str) -> None:
        """What follows is in this phase."""
        self._script = []
        self.stretches.append(Stretch(phase, self._script))

    def empty_cache(self) -> None:
        """torch.cuda.empty_cache(): cached segments are freed. Not inside of what is written once and comes again."""
        self._script = []
        self.stretches.append(Stretch(self.stretches[-1].phase, self._script, after_empty_cache=True))

    def take(self, size: int, stream: int = 0, component: Component = Component.COMMUNICATION_BUFFERS) -> int:
        """A new storage with one owner, allocated on a CUDA stream: 0 is the default stream."""
        number = len(self._owners)
        self.components.append(component)
        self._script.append(size + (stream << STREAM_SHIFT) if size else 0)
        self._owners.append(1)
        if not size:
            self._parts[number] = ()
        return number

    def take_once(self, size: int, component: Component = Component.COMMUNICATION_BUFFERS) -> int:
        """A new storage that stays until the end, and is not made again where what is written now comes again."""
        number = self.take(size, 0, component)
        self._once.add(number)
        return number

    def play(self, script: Script, component: Component = Component.COMMUNICATION_BUFFERS) -> int:
        """Buffers taken and given back inside an operator: those left over are one storage with one owner."""
        taken: list[tuple[int, int]] = []
        for change in script:
            if change > 0:
                taken.append((change, self.take(change, 0, component)))
            elif change:  # the newest of that size
                last = max(index for index, (size, _) in enumerate(taken) if size == -change)
                self.drop((taken.pop(last)[1],))
        if not taken:
            return self.take(0, 0, component)
        number = taken[-1][1]
        if len(taken) > 1:
            self._parts[number] = tuple(each for _, each in taken)
        return number

    def relabel(self, number: int, component: Component) -> None:
        """Set what a storage is for, which its reader knows better than what has made it."""
        self.components[number] = component

    def hold(self, number: int) -> None:
        """One more owner."""
        self._owners[number] += 1

    def drop(self, numbers: Iterable[int]) -> None:
        """One owner less of each."""
        owners = self._owners
        for number in numbers:
            owners[number] -= 1
            if owners[number]:
                continue
            if number in self._parts:
                self._script.extend(~each for each in self._parts[number])
            else:
                self._script.append(~number)

    # -- what comes again ----------------------------------------------------------------------------------------------

    def mark(self) -> tuple[int, int]:
        """Where the list is now, for `since`."""
        return len(self._script), len(self._owners)

    def since(self, mark: tuple[int, int]) -> Written:
        """What was written in this phase since a mark."""
        begin, first = mark
        script, made = self._script[begin:], [*range(first, len(self._owners))]
        if not self._once.isdisjoint(made):
            numbers = iter(made)
            script = [change for change in script if change < 0 or next(numbers) not in self._once]
            made = [number for number in made if number not in self._once]
        parts = {number: parts for number, parts in self._parts.items() if number >= first and number not in self._once}
        return Written(script, made, [self._owners[number] for number in made], parts)

    def again(self, written: Written, new: dict[int, int]) -> None:
        """The same requests once more, for new storages.

        Args:
            written: the requests.
            new: from the storages that were made then to those that are made now; those of these requests are added.
                Requests to give back others than these do not come again: a KeyError.
        """
        first = len(self._owners)
        new.update(zip(written.made, range(first, first + len(written.made)), strict=True))
        self._owners.extend(written.owners)
        self.components.extend(map(self.components.__getitem__, written.made))
        for number, parts in written.parts.items():
            self._parts[new[number]] = tuple(new[part] for part in parts)
        self._script.extend([change if change >= 0 else ~new[~change] for change in written.script])


@dataclass(frozen=True, slots=True)
class Replay:
    """What the allocator made of a run's requests. Bytes.

    Args:
        tops: for each phase the most that was in use at once, and the most that was asked for in whole blocks.
        reserved_bytes: the most that the allocator held of the device.
        retries: how often it emptied its cache for a request; 0: all is as on a device that never runs out.
    """

    tops: dict[str, tuple[int, int]]
    reserved_bytes: int
    retries: int = 0

    @property
    def rests(self) -> dict[str, int]:
        """For each phase how much higher it rises than it would if the remainder of every block were split off."""
        return {phase: whole - asked for phase, (whole, asked) in self.tops.items()}

    @property
    def asked(self) -> dict[str, int]:
        """For each phase the most that is asked for at once, rounded up to blocks."""
        return {phase: asked for phase, (_, asked) in self.tops.items()}

    @property
    def played(self) -> Played:
        """What the allocator adds to what is asked for."""
        return Played(self.rests, self.reserved_bytes)


def replay(
    requests: Requests,
    alloc_conf: str = "",
    torch: str = DEFAULT_VERSION,
    room: int | None = None,
    capacity: int | None = None,
) -> Replay:
    """Plays a run's requests to PyTorch's allocator.

    Args:
        requests: the run.
        alloc_conf: as PYTORCH_CUDA_ALLOC_CONF.
        torch: the release of PyTorch whose allocator it is, such as "2.13".
        room: bytes that the allocator can have of the device: it gives cached blocks back before it fails. None: of a
            device that never runs out.
        capacity: bytes of the device, by which the allocator reserves addresses for segments that expand: how far one
            can grow decides which block is taken. None: the room.

    Raises:
        InputError: the release does not take these settings.
        OutOfMemory: the room has no place for a request.
    """
    allocator = allocator_of(alloc_conf, torch, room, capacity)
    tops = _tops((stretch.phase, play(allocator, stretch)) for stretch in requests.stretches if not stretch.is_empty)
    return Replay(tops, allocator.peak_reserved_bytes, allocator.retries)


def play(allocator: Scripted, stretch: Stretch) -> Highest:
    """Serve a stretch."""
    if stretch.after_empty_cache:
        allocator.empty_cache()
    return allocator.play(stretch.script)


def reserved_upper_bound(requests: Requests) -> int:
    """Bytes that a replay with default settings never reserves more than; five times as quick. See `most_reserved`."""
    return most_reserved(stretch.script for stretch in requests.stretches)


def _tops(found: Iterable[tuple[str, tuple[int, int]]]) -> dict[str, tuple[int, int]]:
    """The highest of each phase, which may have several stretches."""
    tops: dict[str, tuple[int, int]] = {}
    for phase, (whole, asked) in found:
        before = tops.get(phase, (0, 0))
        tops[phase] = max(before[0], whole), max(before[1], asked)
    return tops
