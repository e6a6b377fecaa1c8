"""The allocator requests of a run: recorded once, then replayed.

A step's requests do not depend on the allocator, so one list serves every setting, PyTorch version and GPU.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Self

from memcalc.allocator.pytorch.bound import most_reserved
from memcalc.allocator.pytorch.constants import STREAM_SHIFT
from memcalc.allocator.pytorch.lean import PeakBytes
from memcalc.allocator.pytorch.script_replay import ScriptAllocator, allocator_of
from memcalc.allocator.pytorch.versions import DEFAULT_VERSION
from memcalc.ledger.component import Component
from memcalc.ledger.row_drafts import RowDraft
from memcalc.workspaces import Script


class TensorLabel(NamedTuple):
    """A tensor of a block's program."""

    block: int  # number of the block in its stage
    storage: int  # number of the storage in the program
    component: Component  # component of the storage


class EngineTensor(NamedTuple):
    """A tensor of a sharding engine, of any size."""

    component: Component  # component of the tensor
    tensor: str  # name in rows
    dtype: str  # dtype
    symbol: str  # number of elements, in symbols
    source: str  # source of the rule
    pieces: int = 1  # number of storages that form one tensor, such as the parameters of a unit


Label = Component | TensorLabel | EngineTensor | RowDraft  # label of a storage; a row draft describes one storage


class RequestInterval(NamedTuple):
    """Consecutive requests of one phase, encoded for `LeanAllocator.play`."""

    phase: str  # name of the phase
    script: list[int]  # the encoded requests
    after_empty_cache: bool = False  # whether torch.cuda.empty_cache() precedes them

    @property
    def is_empty(self) -> bool:
        """Whether the interval has neither a phase nor a request."""
        return not (self.phase or self.script)


class Beginning(NamedTuple):
    """The beginning of a steady step or a micro-batch: the numbers of intervals and of storages before it."""

    stretch: int
    storage: int


class NamedRounds(int):
    """A named number of rounds in a recorded stream, which each run sets."""

    name: Hashable

    def __new__(cls, rounds: int, name: Hashable) -> Self:
        """Return a number of rounds with a name."""
        found = super().__new__(cls, rounds)
        found.name = name
        return found


class Loop(NamedTuple):
    """Consecutive requests of an interval that represent several equal rounds."""

    stretch: int  # index of the interval
    begin: int  # the position of its first request
    end: int  # the position after its last request
    rounds: int  # number of rounds


class RecordedRequests(NamedTuple):
    """Recorded requests that can be repeated, with the storages that they allocate."""

    script: list[int]  # the encoded requests, without those of `take_once`
    made: list[int]  # the storages that they allocate, one for each positive or zero request
    owners: list[int]  # number of owners of each storage at the end
    parts: dict[int, tuple[int, ...]]  # the requests of each storage that is not exactly one block

    def without(self, storages: AbstractSet[int]) -> RecordedRequests:
        """Return the requests without those of storages that they allocate and free."""
        numbers = iter(self.made)
        script = [change for change in self.script if (~change if change < 0 else next(numbers)) not in storages]
        kept = [place for place, number in enumerate(self.made) if number not in storages]
        made, owners = ([each[place] for place in kept] for each in (self.made, self.owners))
        return RecordedRequests(script, made, owners, self.parts)


class Requests:
    """The list of requests, recorded storage by storage. A storage is freed when its last owner releases it.

    A storage is identified by the index of its request. A storage of several blocks has the index of its last request,
    and an empty one the index of an empty request.

    `labels` has the label of each storage. The default is a buffer of the sharding engine.
    """

    # Whether collectives of a process group end in the order in which they begin, as in NCCL, which runs them on one
    # stream (torch 2.13 csrc/distributed/c10d/ProcessGroupNCCL.cpp, ncclStreams_); those of PyTorch's fake process
    # group do not run. Of interest where `wait_for` has an effect.
    collectives_in_order = True

    def __init__(self) -> None:
        self.stretches: list[RequestInterval] = []
        self.steady: list[Beginning] = []  # two steps that may repeat; the last one is the end of the run
        self.rounds = 1  # of the loop that is being recorded
        self.loops: list[Loop] = []  # in order; empty for a replay
        self.labels: list[Label] = []
        # A subclass may inspect every request, so its requests are never copied from recorded ones.
        self.repeats = type(self) is Requests
        self._script: list[int] = []
        self._owners: list[int] = []
        self._parts: dict[int, tuple[int, ...]] = {}  # the requests of each storage that is not exactly one block
        self.once: set[int] = set()  # storages of `take_once`
        self.begin("")

    def begin(self, phase: str) -> None:
        """Begin a phase: all requests that follow belong to it."""
        self._script = []
        self.stretches.append(RequestInterval(phase, self._script))

    def next_beginning(self) -> Beginning:
        """Return where the next interval begins."""
        return Beginning(len(self.stretches), len(self._owners))

    def beginning(self) -> Beginning:
        """Return where the current interval begins, in which nothing has been recorded yet."""
        return Beginning(len(self.stretches) - 1, len(self._owners))

    @contextmanager
    def repeat(self, rounds: int) -> Iterator[None]:
        """Repeat the requests recorded in the context for a number of rounds, each with separate storages.

        Storages that a round does not free stay, once for each round. Storages of earlier rounds or of another loop
        that it frees are freed once in each round. Only `peaks` supports loops.
        """
        begin, before, self.rounds = len(self._script), self.rounds, rounds
        yield
        self.rounds = before
        if rounds > 1 or isinstance(rounds, NamedRounds):
            self.loops.append(Loop(len(self.stretches) - 1, begin, len(self._script), rounds))

    def empty_cache(self) -> None:
        """Record torch.cuda.empty_cache(), which frees cached segments. Not allowed inside repeated requests."""
        self._script = []
        self.stretches.append(RequestInterval(self.stretches[-1].phase, self._script, after_empty_cache=True))

    def take(self, size: int, stream: int = 0, label: Label = Component.COMMUNICATION_BUFFERS) -> int:
        """Allocate a storage with one owner on a CUDA stream (0 is the default stream); return its index."""
        number = len(self._owners)
        self.labels.append(label)
        self._owners.append(1)
        if size:
            self._script.append(size + (stream << STREAM_SHIFT) if stream else size)
        else:
            self._script.append(0)
            self._parts[number] = ()
        return number

    def take_once(self, size: int, label: Label = Component.COMMUNICATION_BUFFERS) -> int:
        """Allocate a storage that is not allocated, or freed, again when these requests are repeated."""
        number = self.take(size, 0, label)
        self.once.add(number)
        return number

    def play(self, script: Script, label: Label = Component.COMMUNICATION_BUFFERS, stream: int = 0) -> int:
        """Allocate and free an operator's internal buffers; the remaining ones become one storage with one owner."""
        taken: list[tuple[int, int]] = []
        for change in script:
            if change > 0:
                taken.append((change, self.take(change, stream, label)))
            elif change:  # frees the newest buffer of that size
                last = max(index for index, (size, _) in enumerate(taken) if size == -change)
                self.drop((taken.pop(last)[1],))
        if not taken:
            return self.take(0, stream, label)
        number = taken[-1][1]
        if len(taken) > 1:
            self._parts[number] = tuple(each for _, each in taken)
        return number

    def relabel(self, number: int, label: Label) -> None:
        """Replace the label of a storage, if a later reader knows more than the code that allocated it."""
        self.labels[number] = label

    def hold(self, number: int, owners: int = 1) -> None:
        """Add owners to a storage."""
        self._owners[number] += owners

    def owners(self, numbers: Iterable[int]) -> dict[int, int]:
        """Return the number of owners of each of these storages."""
        return {number: self._owners[number] for number in numbers}

    @property
    def components(self) -> list[Component]:
        """Return the component of each storage."""
        return [label if isinstance(label, Component) else label.component for label in self.labels]

    def drop(self, numbers: Iterable[int]) -> None:
        """Remove one owner of each storage, and free the storages without owners."""
        owners = self._owners
        for number in numbers:
            owners[number] -= 1
            if owners[number]:
                continue
            if number in self._parts:
                self._script.extend(~each for each in self._parts[number])
            else:
                self._script.append(~number)

    def drop_used(self, numbers: Iterable[int], stream: int) -> None:  # noqa: ARG002 - of a stream that is on time
        """Remove one owner of storages of a CUDA stream that another one still uses.

        PyTorch frees such a block when an event of that stream is complete (Tensor.record_stream): here at once.

        Args:
            numbers: the storages.
            stream: the stream that uses them.
        """
        self.drop(numbers)

    def event(self, stream: int) -> int:  # noqa: ARG002
        """Record an event on a stream, for `wait_for`."""
        return 0

    def wait_for(self, stream: int, event: int) -> None:
        """Let the host wait for an event, and free what the stream used before it."""

    def wait(self) -> None:
        """Let the host wait for all streams."""

    # -- repeated requests ---------------------------------------------------------------------------------------------

    def mark(self) -> tuple[int, int]:
        """Return the current position in the list, for `since`."""
        return len(self._script), len(self._owners)

    def since(self, mark: tuple[int, int]) -> RecordedRequests:
        """Return the requests recorded in this phase since a mark."""
        begin, first = mark
        script, made = self._script[begin:], [*range(first, len(self._owners))]
        if not self.once.isdisjoint(made):
            numbers = iter(made)
            script = [change for change in script if (~change if change < 0 else next(numbers)) not in self.once]
            made = [number for number in made if number not in self.once]
        parts = {number: parts for number, parts in self._parts.items() if number >= first and number not in self.once}
        return RecordedRequests(script, made, [self._owners[number] for number in made], parts)

    def again(self, written: RecordedRequests, new: dict[int, int]) -> None:
        """Repeat recorded requests for new storages.

        Args:
            written: the requests.
            new: maps storages of the recording to current ones; must contain the storages that the requests free but do
                not allocate (otherwise KeyError). The storages allocated here are added.
        """
        self._repeat(written, new, map(self.labels.__getitem__, written.made))

    def insert(self, written: RecordedRequests, labels: Iterable[Label]) -> None:
        """Repeat requests of another list, which free only what they allocate; `labels`: of their storages."""
        self._repeat(written, {}, labels)

    def _repeat(self, written: RecordedRequests, new: dict[int, int], labels: Iterable[Label]) -> None:
        first = len(self._owners)
        new.update(zip(written.made, range(first, first + len(written.made)), strict=True))
        self._owners.extend(written.owners)
        self.labels.extend(labels)
        for number, parts in written.parts.items():
            self._parts[new[number]] = tuple(new[part] for part in parts)
        self._script.extend([change if change >= 0 else ~new[~change] for change in written.script])

    def with_intervals(self, intervals: list[RequestInterval], steady: list[Beginning]) -> Requests:
        """Return the same requests with other sizes and steady steps. Both share all else: record to neither."""
        found = copy(self)
        found.stretches, found.steady = intervals, steady
        return found

    def carried(self) -> list[tuple[int, int]] | None:
        """Return pairs of storages that the two steady steps free, but that were allocated before each of them.

        None if the first step does not begin with the requests of the second, or frees more earlier storages.
        """
        before, after = self.steady
        first, second = self.stretches[before.stretch : after.stretch], self.stretches[after.stretch :]
        shift, older = after.storage - before.storage, ~before.storage
        places = [[(each.phase, each.after_empty_cache) for each in step] for step in (first, second)]
        lengths = [[len(each.script) for each in step[: len(second) - 1]] for step in (first, second)]
        again = [change - shift if change <= older else change for each in first for change in each.script]
        made = [change for each in second for change in each.script]
        if places[0][: len(second)] != places[1] or lengths[0] != lengths[1] or len(made) > len(again):
            return None
        pairs = [(~mine, ~theirs) for mine, theirs in zip(again, made, strict=False) if mine != theirs]
        alike = all(0 <= mine < before.storage and 0 <= theirs < after.storage for mine, theirs in pairs)
        return pairs if alike and len(pairs) == len([change for change in again if older < change < 0]) else None


class DelayedRequests(Requests):
    """The list of requests on a GPU that is as late as possible: work is complete only when the host waits for it.

    Storages of `drop_used` are freed then. Until then a replay reserves other memory for what follows.

    Args:
        collectives_in_order: see `Requests`.
    """

    def __init__(self, *, collectives_in_order: bool = True) -> None:
        super().__init__()
        self.collectives_in_order = collectives_in_order
        self._pending: dict[int, deque[int]] = {}  # storages that a stream uses, in order
        self._freed: Counter[int] = Counter()  # how many of each stream the host has waited for

    def drop_used(self, numbers: Iterable[int], stream: int) -> None:
        """Remove one owner of each storage when the host next waits for the stream."""
        self._pending.setdefault(stream, deque()).extend(numbers)

    def event(self, stream: int) -> int:
        """Return the number of storages that the stream has used so far."""
        return self._freed[stream] + len(self._pending.get(stream, ()))

    def wait_for(self, stream: int, event: int) -> None:
        """Free the storages that the stream used before the event."""
        pending = self._pending.get(stream, deque())
        while self._freed[stream] < event:
            self._freed[stream] += 1
            self.drop((pending.popleft(),))

    def wait(self) -> None:
        """Free all storages of `drop_used`."""
        for stream in self._pending:
            self.wait_for(stream, self.event(stream))


class AllocatorOverhead(NamedTuple):
    """Allocator overhead of a run, from an allocator replay."""

    remainders: Mapping[str, int]  # by phase, bytes of blocks beyond the requested bytes
    reserved_bytes: int  # peak reserved bytes
    # the overhead of each pipeline stage, if there are several; the other fields are then of the stage that needs most
    by_stage: Mapping[int, AllocatorOverhead] = MappingProxyType({})

    def of(self, stage: int) -> AllocatorOverhead:
        """Return the overhead of one pipeline stage."""
        return self.by_stage.get(stage, self)


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of replaying a run's requests. Bytes."""

    # for each phase the peak allocated bytes, and the peak of requests rounded to whole blocks
    tops: dict[str, tuple[int, int]]
    reserved_bytes: int  # peak reserved bytes
    retries: int = 0  # how often the cache was emptied for a request; 0 if the device was large enough

    @property
    def rests(self) -> dict[str, int]:
        """Unsplit block remainders at the peak of each phase, in bytes."""
        return {phase: whole - asked for phase, (whole, asked) in self.tops.items()}

    @property
    def asked(self) -> dict[str, int]:
        """The peak of requested bytes in each phase, rounded up to whole blocks."""
        return {phase: asked for phase, (_, asked) in self.tops.items()}

    @property
    def played(self) -> AllocatorOverhead:
        """The allocator overhead beyond requested bytes, for the estimate."""
        return AllocatorOverhead(self.rests, self.reserved_bytes)


def replay(
    requests: Requests,
    alloc_conf: str = "",
    torch: str = DEFAULT_VERSION,
    room: int | None = None,
    capacity: int | None = None,
) -> Replay:
    """Replay a run's requests through the PyTorch allocator.

    Args:
        requests: the run.
        alloc_conf: settings in the syntax of PYTORCH_CUDA_ALLOC_CONF.
        torch: the PyTorch version, for example "2.13".
        room: bytes of the device that the allocator can use; it frees cached blocks before it fails. None: no limit.
        capacity: bytes of the device, which determine the address space of expandable segments, and so how far blocks
            can grow and which one is allocated. None: the same as `room`.

    Raises:
        InputError: the version does not accept these settings.
        OutOfMemory: a request does not fit.
    """
    allocator = allocator_of(alloc_conf, torch, room, capacity)
    return Replay(_tops(_played(allocator, requests)), allocator.peak_reserved_bytes, allocator.retries)


def _played(allocator: ScriptAllocator, requests: Requests) -> Iterator[tuple[str, PeakBytes]]:
    """Replay a run; yield the peak of each interval.

    The second steady step is skipped if it gets the blocks of the first one, request by request.
    """
    steps = [step.stretch for step in requests.steady]
    for number, interval in enumerate(requests.stretches):
        if number in steps:
            if number == steps[-1] and allocator.would_repeat(requests.carried):
                return
            allocator.watch()
        if not interval.is_empty:
            yield interval.phase, play(allocator, interval)


def play(allocator: ScriptAllocator, interval: RequestInterval) -> PeakBytes:
    """Replay consecutive requests of one phase."""
    if interval.after_empty_cache:
        allocator.empty_cache()
    return allocator.play(interval.script)


def reserved_upper_bound(requests: Requests) -> int:
    """Return an upper bound of the bytes that a replay with default settings reserves, without a replay.

    Five times as fast as the replay; see `most_reserved`.
    """
    return most_reserved(interval.script for interval in requests.stretches)


def _tops(found: Iterable[tuple[str, tuple[int, int]]]) -> dict[str, tuple[int, int]]:
    """Return the peaks of each phase, which may have several intervals of requests."""
    tops: dict[str, tuple[int, int]] = {}
    for phase, (whole, asked) in found:
        before = tops.get(phase, (0, 0))
        tops[phase] = max(before[0], whole), max(before[1], asked)
    return tops
