"""One recording of a run for several orders of batch lengths, which differ only in the sizes of requests.

A recording has placeholders in place of sizes that depend on a batch's length. Another order of lengths is the same
list of requests with other sizes, unless a length changes what the blocks allocate: an operator that needs a workspace
only for many tokens, or a mask that short batches do without. Such an order is recorded, too, and serves further ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache
from itertools import cycle
from typing import NamedTuple

from memcalc.allocator.pytorch.constants import SIZE_MASK, STREAM_SHIFT
from memcalc.architectures.structure import BlockStructure, block_structure
from memcalc.layout.sequence_sharding import has_ring_attention
from memcalc.layout.stages import LayerModules, Stage, layer_modules, stages_of
from memcalc.programs.program import Program
from memcalc.programs.sized_program import ProgramSizer, SizedProgram, run_sizer
from memcalc.simulation.batch_lengths import BatchLength, length_of, orders_of, with_length
from memcalc.simulation.simulated_run import SimulatedRun, further_steps, repeated_steps
from memcalc.spec.scoring import scored_by_reference
from memcalc.spec.spec import Spec
from memcalc.states.state_options import state_options
from memcalc.stream.requests import Beginning, Requests
from memcalc.workspaces import Script

_FIRST = 1 << STREAM_SHIFT - 1  # the first placeholder, larger than any size


class Slot(NamedTuple):
    """What a placeholder stands for.

    Args:
        program: a block's program.
        storage: number of the storage in the program.
        buffer: number of the buffer, in the order of allocation, if the storage is an operator's workspace; else None.
    """

    program: Program
    storage: int
    buffer: int | None = None


class Shape(NamedTuple):
    """What a program's requests depend on besides the sizes.

    Args:
        is_empty: whether each storage has no bytes.
        workspaces: the allocations and frees of each workspace: n allocates its n-th buffer, ~n frees it.
    """

    is_empty: list[bool]
    workspaces: dict[int, list[int]]

    def covers(self, other: Shape) -> bool:
        """Return whether the other requests are the same, except that storages may be empty."""
        return self == other or (
            all(theirs or not ours for ours, theirs in zip(self.is_empty, other.is_empty, strict=True))
            and all(theirs in ([], self.workspaces[at]) for at, theirs in other.workspaces.items())
        )


class OpenProgram(SizedProgram):
    """A program with placeholders in place of sizes.

    Args:
        program: the program.
        shape: what its sizes leave open.
        placeholder: function that returns the placeholder of a slot.
    """

    def __init__(self, program: Program, shape: Shape, placeholder: Callable[[Slot], int]) -> None:
        super().__init__(program, {})
        self._shape, self._placeholder = shape, placeholder

    @cached_property
    def exact(self) -> list[int]:
        """The placeholder of each storage; 0 if it is empty."""
        slots = (Slot(self.program, at) for at in range(len(self.program.storages)))
        return [
            0 if is_empty else self._placeholder(slot)
            for slot, is_empty in zip(slots, self._shape.is_empty, strict=True)
        ]

    @cached_property
    def scripts(self) -> dict[int, Script]:
        """The placeholders of each workspace's buffers."""
        return {
            at: tuple(self._buffer(at, change) for change in changes) for at, changes in self._shape.workspaces.items()
        }

    def _buffer(self, storage: int, change: int) -> int:
        if change < 0:
            return -self._placeholder(Slot(self.program, storage, ~change))
        return self._placeholder(Slot(self.program, storage, change))


class SizedBatch:
    """Batches of one length: their programs and sizes.

    Args:
        spec: the run with this sequence length.
        stage: its stage.
    """

    def __init__(self, spec: Spec, stage: Stage) -> None:
        self.spec, self.stage = spec, stage
        self.sizer = run_sizer(spec, spec.gpu)
        self._shapes: dict[Program, Shape] = {}

    @cached_property
    def blocks(self) -> tuple[BlockStructure, list[LayerModules]]:
        """What the programs of the blocks depend on."""
        return block_structure(self.spec), [layer_modules(self.spec, layer) for layer in self.stage.numbers]

    def shape(self, program: Program) -> Shape:
        """Return the shape of a program at this length."""
        if program not in self._shapes:
            sized = self.sizer.sized(program)
            workspaces = {at: _frees(script) for at, script in sized.scripts.items()}
            self._shapes[program] = Shape([not size for size in sized.exact], workspaces)
        return self._shapes[program]

    def size(self, slot: Slot) -> int:
        """Return the bytes of a slot; 0 for a buffer that the workspace lacks at this length."""
        sized = self.sizer.sized(slot.program)
        if slot.buffer is None:
            return sized.exact[slot.storage]
        buffers = [change for change in sized.scripts[slot.storage] if change > 0]
        return buffers[slot.buffer] if slot.buffer < len(buffers) else 0


def _frees(script: Script) -> list[int]:
    """Return a script by number of buffer; like `Requests.play`, a free is of the newest buffer of its size."""
    found: list[int] = []
    live: list[tuple[int, int]] = []  # size and number
    made = 0
    for change in script:
        if change > 0:
            live.append((change, made))
            found.append(made)
            made += 1
        elif change:
            freed = next(each for each in reversed(live) if each[0] == -change)
            live.remove(freed)
            found.append(~freed[1])
    return found


class OpenSizer(ProgramSizer):
    """The sizer of a recording with placeholders.

    Args:
        length: the length of its batches, which determines the shape of programs.
        placeholder: function that returns the placeholder of a slot.
    """

    def __init__(self, length: SizedBatch, placeholder: Callable[[Slot], int]) -> None:
        super().__init__({})
        self._length, self._placeholder = length, placeholder

    def sized(self, program: Program) -> SizedProgram:
        """Return the program with placeholders."""
        if program not in self._known:
            self._known[program] = OpenProgram(program, self._length.shape(program), self._placeholder)
        return self._known[program]


class LengthRecording:
    """A run with placeholders, recorded in one order of lengths.

    Args:
        spec: the run.
        rank: the data-parallel rank; None: the one that holds most.
        lengths: the length of each micro-batch.
        batches: the lengths of batches.
    """

    def __init__(
        self,
        spec: Spec,
        rank: int | None,
        lengths: tuple[BatchLength, ...],
        batches: Callable[[BatchLength], SizedBatch],
    ) -> None:
        self.lengths = lengths
        self._spec, self._batches = spec, batches
        self._slots: dict[Slot, int] = {}  # with their placeholders
        self._tables: dict[BatchLength, dict[int, int]] = {}  # by length
        self._scripts: dict[tuple[int, BatchLength], list[int]] = {}  # by number of the interval and length
        sizers = {length: OpenSizer(batches(length), self._placeholder) for length in lengths}
        run = SimulatedRun(spec, Requests(), rank=rank, lengths=lengths, sizer_of=lambda run: sizers[length_of(run)])
        self._requests, self._beginnings, self._steps = run.play(), run.beginnings, run.steady_steps
        self._ends = run.steady_ends
        self._programs = {slot.program for slot in self._slots}
        scripts = (interval.script for interval in self._requests.stretches)
        self._open = {change for script in scripts for change in script if change > 0 and change & SIZE_MASK >= _FIRST}

    def _placeholder(self, slot: Slot) -> int:
        return self._slots.setdefault(slot, _FIRST + len(self._slots))

    def serves(self, lengths: tuple[BatchLength, ...]) -> bool:
        """Return whether an order of lengths makes the same requests, of other sizes."""
        pairs = {*zip(self.lengths, lengths, strict=False)}
        return len(lengths) == len(self.lengths) and all(
            self._covers(self._batches(ours), self._batches(other)) for ours, other in pairs
        )

    def _covers(self, ours: SizedBatch, other: SizedBatch) -> bool:
        return ours.blocks == other.blocks and all(
            ours.shape(program).covers(other.shape(program)) for program in self._programs
        )

    def requests(self, lengths: tuple[BatchLength, ...]) -> Requests:
        """Return the requests of an order of lengths that it serves."""
        tables = {length: self._table(length) for length in lengths}
        stretches, empty = [*self._requests.stretches], list[int]()
        following = (*self._beginnings[1:], Beginning(len(stretches), len(self._requests.labels)))
        for begin, end, length in zip(self._beginnings, following, cycle(lengths), strict=False):
            table = tables[length]
            for at in range(begin.stretch, end.stretch):
                stretches[at] = stretches[at]._replace(script=self._script(at, length))
            if none := {change for change, size in table.items() if not size}:
                made = self._made[begin.storage : end.storage]
                empty += [~number for number, change in enumerate(made, begin.storage) if change in none]
        if empty:  # nothing is allocated, and so nothing freed
            frees = frozenset(empty)
            for at in range(self._beginnings[0].stretch, len(stretches)):
                script = [change for change in stretches[at].script if change not in frees]
                stretches[at] = stretches[at]._replace(script=script)
        return self._requests.with_intervals(stretches, repeated_steps(self._spec, lengths, self._steps))

    def first_steps(self, steps: int) -> Requests:
        """Return the requests of its own lengths, without those after a number of steady steps."""
        whole = self.requests(self.lengths)
        intervals = whole.stretches[: self._ends[steps - 1]]
        return whole.with_intervals(intervals, repeated_steps(self._spec, self.lengths, self._steps[:steps]))

    def _script(self, at: int, length: BatchLength) -> list[int]:
        """Return the requests of an interval with batches of one length, which orders of lengths share."""
        if (at, length) not in self._scripts:
            table = self._table(length)
            script = self._requests.stretches[at].script
            self._scripts[at, length] = [*map(table.get, script, script)]
        return self._scripts[at, length]

    def _table(self, length: BatchLength) -> dict[int, int]:
        """Return the encoded request for each encoded placeholder."""
        if length not in self._tables:
            batches = self._batches(length)
            sizes = {placeholder: batches.size(slot) for slot, placeholder in self._slots.items()}
            self._tables[length] = {
                change: change - placeholder + size if (size := sizes[placeholder := change & SIZE_MASK]) else 0
                for change in self._open
            }
        return self._tables[length]

    @cached_property
    def _made(self) -> list[int]:
        """The encoded request of each storage."""
        return [change for interval in self._requests.stretches for change in interval.script if change >= 0]


class LengthRecordings:
    """The recordings of a run.

    Args:
        spec: the run, one that `can_share`.
        rank: the data-parallel rank; None: the one that holds most.
    """

    def __init__(self, spec: Spec, rank: int | None) -> None:
        self._spec, self._rank, self._stage = spec, rank, stages_of(spec)[0]
        self._lengths: dict[BatchLength, SizedBatch] = {}
        self._known: list[LengthRecording] = []

    def requests(self, lengths: tuple[BatchLength, ...]) -> Requests:
        """Return the requests of an order of lengths.

        Most orders are served by a recording of batches that are as long as possible, because they need all workspaces.
        """
        self._of_longest(len(lengths))
        found = next((each for each in self._known if each.serves(lengths)), None) or self._record(lengths)
        return found.requests(lengths)

    def of_one_length(self) -> Requests:
        """Return the requests of batches of one length, for a replay: labels and a few last frees are those of more."""
        recording = self._of_longest(max(map(len, orders_of(self._spec))))
        return recording.first_steps(1 + further_steps(self._spec))

    def _of_longest(self, number: int) -> LengthRecording:
        """Return the recording of a number of batches that are as long as possible."""
        lengths = (length_of(self._spec),) * number
        return next((each for each in self._known if each.lengths == lengths), None) or self._record(lengths)

    def _record(self, lengths: tuple[BatchLength, ...]) -> LengthRecording:
        self._known.append(LengthRecording(self._spec, self._rank, lengths, self._batches))
        return self._known[-1]

    def _batches(self, length: BatchLength) -> SizedBatch:
        if length not in self._lengths:
            self._lengths[length] = SizedBatch(with_length(self._spec, length), self._stage)
        return self._lengths[length]


@lru_cache(maxsize=1)
def length_recordings(spec: Spec, rank: int | None) -> LengthRecordings:
    """Return the recordings of a run, which its orders of lengths share."""
    return LengthRecordings(spec, rank)


def can_share(spec: Spec) -> bool:
    """Return whether orders of lengths can share recordings.

    The batches of a teacher or a reference have sizes of their own, those of a ring depend on the rank, and Megatron's
    engine reads sizes.
    """
    several = spec.training.teacher is not None or scored_by_reference(spec) or has_ring_attention(spec)
    return not several and state_options(spec).engine != "megatron"
