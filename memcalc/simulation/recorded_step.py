"""The transient tensors of a step, as requests: forward, loss and backward of the last micro-batch in flight.

The requests and their order do not depend on the sizes of a batch. So a step is recorded once for all runs with the
same modules, layers and engine, and each run fills in its sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

from memcalc.allocator.pytorch.block_sizes import rounded
from memcalc.architectures.structure import block_structure
from memcalc.errors import InputError
from memcalc.layout.schedules import uses_pipelining
from memcalc.layout.stages import READERS, Stage, first_recomputed_layer, modules_by_layer, one_in_flight
from memcalc.ledger.component import Component
from memcalc.ledger.row_drafts import RowDraft
from memcalc.programs.sized_program import ProgramSizer, SizedProgram
from memcalc.sharding.ddp import reduces_again
from memcalc.sharding.engines import takes_gradients_over
from memcalc.simulation.evaluation import FrozenModel, evaluated, evaluates_between_steps, frozen_model
from memcalc.simulation.moments import BesideStates, Moment
from memcalc.simulation.stage_blocks import SizedBlock, module_of
from memcalc.simulation.step_recorder import (
    EXISTING,
    FROZEN,
    IN_FLIGHT,
    POLICY,
    Layers,
    RecordedStream,
    StepRecorder,
)
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.spec.recompute_plan import Segment, has_segments
from memcalc.spec.scoring import scores_itself
from memcalc.spec.spec import Spec
from memcalc.states.gradient_policy import gradient_policy
from memcalc.states.pipelining import drains, keeps_passed_on
from memcalc.states.state_options import state_options
from memcalc.stream.peaks import IntervalPeak, SizelessStream, StorageKind, live_at, peaks
from memcalc.stream.requests import EngineTensor, TensorLabel

# Components of storages from before the step, which are counted with the run's states and buffers.
COUNTED_BEFORE = (Component.GRADIENTS, Component.COMMUNICATION_BUFFERS)
MOST_RECORDED = 1024  # cached steps, of some 80 KB each


class RecordingInput:
    """Input of a recording, for a cache; equal if the keys are equal.

    Args:
        key: everything that the recording depends on.
        record: function that records the step.
    """

    __slots__ = ("key", "record")

    def __init__(self, key: Hashable, record: Callable[[], RecordedStream]) -> None:
        self.key = key
        self.record = record

    def __hash__(self) -> int:
        """Hash the key."""
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        """Compare the keys."""
        return isinstance(other, RecordingInput) and self.key == other.key


@lru_cache(maxsize=MOST_RECORDED)
def _recorded(given: RecordingInput) -> RecordedStream:
    return given.record()


def _key(spec: Spec, chunk: Stage, layers: Layers, *, exist: bool) -> Hashable:
    """Return everything that a recorded micro-batch depends on."""
    options, modules = state_options(spec), modules_by_layer(spec)
    recomputes = spec.training.recompute not in ("none", "selective")
    return (
        block_structure(spec),
        spec.training.implementation,
        tuple((_shifted(loop.items, chunk.first), loop.rounds > 1) for loop in layers.played),
        tuple((modules(layer), spec.model.has_window(layer)) for layer in layers.numbers),
        tuple(first_recomputed_layer(spec, chunk, readers) - chunk.first for readers in ("", *READERS) if recomputes),
        (chunk.has_embedding, chunk.has_head),
        tuple(gradient_policy(spec, exist=exist, sharded=sharded) for sharded in (False, True)),
        exist,
        (keeps_passed_on(spec), spec.parallelism.schedule if uses_pipelining(spec) else ""),
        layers.of_engine if spec.parallelism.has_pipeline_engine else None,
        scores_itself(spec),
        (
            options,
            layers.of_engine,
            spec.model.tie_word_embeddings,
            evaluates_between_steps(spec),
            drains(spec),
        )
        if takes_gradients_over(options) or reduces_again(options)
        else None,
    )


def _shifted(item: int | Segment, by: int) -> Hashable:
    """Return an item of a plan with its layers counted from another one."""
    return item - by if isinstance(item, int) else tuple(_shifted(inner, by) for inner in item)


def rounds_of(chunk: Stage, layers: Layers, of_frozen: Layers | None = None) -> dict[Hashable, int]:
    """Return the rounds of a recording's loops in one run."""
    found: dict[Hashable, int] = {
        "in_flight": chunk.in_flight - 1,
        "embeddings": chunk.embeddings - 1,
        "heads": chunk.heads - 1,
        "waiting": chunk.waiting,
    }
    for index, loop in enumerate(layers.played):
        found[POLICY, index] = loop.rounds
        found["layers in flight", index] = loop.rounds * (chunk.in_flight - 1)
    for index, loop in enumerate(() if of_frozen is None else of_frozen.played):
        found[FROZEN, index] = loop.rounds
    return found


class SizedStream:
    """A recorded stream with the sizes of a run.

    Args:
        recording: the recorded requests.
        sizer: sizes of the run's blocks.
        frozen: a reference model or a teacher, and sizes of its blocks.
        workspace: the cuBLAS workspace that the first backward's first matmul allocates, if it is one of the passes.
    """

    def __init__(
        self,
        recording: RecordedStream,
        sizer: ProgramSizer,
        frozen: tuple[FrozenModel, ProgramSizer] | None,
        workspace: RowDraft | None,
    ) -> None:
        self.recording, self.frozen, self.workspace = recording, frozen, workspace
        self.blocks = [
            (frozen[1] if frozen and number in recording.of_frozen else sizer).sized(block.program)
            for number, block in enumerate(recording.blocks)
        ]

    @cached_property
    def of_others(self) -> list[int]:
        """Block size of each kind of storage, except in the first backward of the run."""
        stream = self.recording.stream
        sizes = [0] * len(stream.kinds)
        of_blocks = [each.sizes for each in self.blocks]
        for number, block, storage in stream.tensors:
            sizes[number] = of_blocks[block][storage]
        for number in stream.others:
            sizes[number] = self.block_bytes(stream.kinds[number], first=False)
        return sizes

    @cached_property
    def of_first(self) -> list[int]:
        """Block size of each kind of storage in the first backward of the run."""
        if self.workspace is None:
            return self.of_others
        sizes, kinds = [*self.of_others], self.recording.stream.kinds
        for number in self.recording.stream.others:
            if kinds[number].once:
                sizes[number] = self.block_bytes(kinds[number], first=True)
        return sizes

    def block_bytes(self, kind: StorageKind, *, first: bool) -> int:
        """Return the bytes of the block of a storage that is no tensor of a block; `first` as in `PassPeak`."""
        if kind.once:
            return self.workspace.each if first and self.workspace is not None else 0
        return rounded(kind.requested)

    @cached_property
    def in_flight(self) -> dict[Hashable, int]:
        """The bytes that one round of each loop of `StepRecorder` over micro-batches in flight holds."""
        stream, found = self.recording.stream, dict[Hashable, int]()
        if IN_FLIGHT not in stream.phases:  # an evaluation is between steps
            return found
        number = stream.phases.index(IN_FLIGHT)
        for begin, end, rounds in stream.split[number]:
            if not isinstance(rounds, int):
                sizes = (self.of_others[kind] for kind in stream.scripts[number][begin:end])
                found[rounds] = found.get(rounds, 0) + sum(sizes)
        return found


class RecordedPasses:
    """The passes of a run's step, or of its evaluation, on one chunk of a stage.

    Args:
        spec: the run.
        chunk: the chunk.
        sized: the recorded requests, with sizes, which passes share that differ in micro-batches in flight.
        rounds: rounds of the recording's loops.
        beside: what the stage holds besides its states while the micro-batch runs, and the moment; None: nothing.
    """

    def __init__(
        self,
        spec: Spec,
        chunk: Stage,
        sized: SizedStream,
        rounds: Mapping[Hashable, int],
        beside: tuple[BesideStates, Moment] | None = None,
    ) -> None:
        self.spec, self.chunk, self.rounds = spec, chunk, rounds
        self.of, self._beside = sized, beside

    @property
    def recording(self) -> RecordedStream:
        """The recording."""
        return self.of.recording

    @property
    def sized(self) -> list[SizedProgram]:
        """The sizes of each block."""
        return self.of.blocks

    @property
    def stream(self) -> SizelessStream:
        """The recorded requests."""
        return self.of.recording.stream

    @cached_property
    def modules(self) -> list[str]:
        """The module of each block in rows."""
        return [self._module_of(number, block) for number, block in enumerate(self.recording.blocks)]

    def _module_of(self, number: int, block: SizedBlock) -> str:
        if self.of.frozen is None or number not in self.recording.of_frozen:
            return module_of(self.spec, self.chunk, block)
        other = self.of.frozen[0]
        return other.name + module_of(other.run, other.chunk, block)

    @cached_property
    def alone(self) -> RecordedPasses:
        """The passes with no other micro-batch in flight, and nothing besides the states."""
        chunk, loops = one_in_flight(self.chunk), self.of.in_flight
        rounds = {name: 0 if name in loops else number for name, number in self.rounds.items()}
        return RecordedPasses(self.spec, chunk, self.of, rounds)

    @cached_property
    def in_flight_bytes(self) -> int:
        """The bytes that other micro-batches in flight hold when the passes begin."""
        return sum(self.rounds[name] * size for name, size in self.of.in_flight.items())

    def peak(self, phase: str, mask: int, *, first: bool = False) -> PassPeak:
        """Return the peak of a pass.

        Args:
            phase: forward, loss, backward or evaluation.
            mask: bits of the phases that the pass stands for.
            first: whether it is the first backward of the run, which allocates cuBLAS's workspace.
        """
        peak = (self._of_first if first else self._of_others)[phase]
        return PassPeak(self, peak, first, mask)

    def beside_bytes(self, mask: int) -> int:
        """Return the bytes that the stage holds besides its states in some phases."""
        return sum(size for phases, size in self._beside_sums.items() if phases & mask)

    @cached_property
    def _beside_sums(self) -> Mapping[int, int]:
        if self._beside is None:
            return {}
        held, moment = self._beside
        return held.sums(moment)

    @cached_property
    def beside(self) -> tuple[RowDraft, ...]:
        """What the stage holds besides its states."""
        if self._beside is None:
            return ()
        held, moment = self._beside
        return held.rows(moment)

    def beside_in(self, mask: int) -> tuple[RowDraft, ...]:
        """Return what the stage holds besides its states in some phases."""
        return tuple(draft._replace(mask=draft.mask & mask) for draft in self.beside if draft.mask & mask)

    @cached_property
    def _of_first(self) -> dict[str, IntervalPeak]:
        if self.of.workspace is None:
            return self._of_others
        return self._by_phase(peaks(self.stream, self.of.of_first, self.rounds, self._all_of_others))

    @cached_property
    def _of_others(self) -> dict[str, IntervalPeak]:
        return self._by_phase(self._all_of_others)

    @cached_property
    def _all_of_others(self) -> list[IntervalPeak]:
        return peaks(self.stream, self.of.of_others, self.rounds)

    def _by_phase(self, found: list[IntervalPeak]) -> dict[str, IntervalPeak]:
        begun = found[self.stream.phases.index(EXISTING)].bytes  # counted with the model states
        moved = found if not begun else [peak._replace(bytes=peak.bytes - begun) for peak in found]
        return dict(zip(self.stream.phases, moved, strict=True))

    def block_bytes(self, kind: StorageKind, *, first: bool) -> int:
        """Return the bytes of the block of a storage that is no tensor of a block; see `peak`."""
        return self.of.block_bytes(kind, first=first)

    def drafts_of(self, live: Mapping[int, int], mask: int, *, first: bool) -> Iterator[RowDraft]:
        """Yield rows of live storages.

        Args:
            live: how many there are of each kind.
            mask: bits of the phases in which they are live.
            first: see `peak`.
        """
        engine: dict[EngineTensor, list[tuple[int, int]]] = {}  # sizes and counts
        for number, count in live.items():
            label, requested, once = self.stream.kinds[number]
            if isinstance(label, TensorLabel):
                yield from self._of_block(label, count, mask)
            elif isinstance(label, EngineTensor):
                engine.setdefault(label, []).append((requested, count))
            elif once:
                if first and self.of.workspace is not None:
                    yield self.of.workspace._replace(count=count, mask=mask)
            elif not (self.recording.takes_over and label in COUNTED_BEFORE):
                raise ValueError(label)
        for label, sizes in engine.items():
            if sum(count for _, count in sizes):  # a label's storages may come from several units
                yield of_engine(label, sizes, mask)

    def _of_block(self, label: TensorLabel, count: int, mask: int) -> Iterator[RowDraft]:
        sized, block, at = self.sized[label.block], self.recording.blocks[label.block], label.storage
        each, size = sized.exact[at], sized.sizes[at]
        if each:
            _, name, dtype, formula, citation = block.program.labels[at]
            shape = sized.shapes[at] or (each // DTYPE_BYTES[dtype],)
            module = self.modules[label.block]
            yield RowDraft(label.component, module, name, shape, dtype, count, each, size, mask, formula, citation)


class _Frozen:
    """The frozen model that runs on a batch, if one does.

    Args:
        spec: the run with the batch.
        chunk: the chunk.

    Attributes:
        layers: its layers.
        key: everything that its recording depends on.
    """

    def __init__(self, spec: Spec, chunk: Stage) -> None:
        self.model = found = frozen_model(spec, chunk)
        self.layers, self.key = None, None
        if found is not None:
            self.layers = Layers(found.run, found.chunk, FROZEN)
            self.key = _key(found.run, found.chunk, self.layers, exist=False)

    def sized(self, sizer_of: Callable[[Spec], ProgramSizer]) -> tuple[FrozenModel, ProgramSizer] | None:
        """Return the model, and the sizes of its blocks."""
        return None if self.model is None else (self.model, sizer_of(self.model.run))


class ChunkPasses:
    """The passes of the micro-batches of a run on one chunk of a stage, which have much in common.

    Args:
        spec: the run.
        chunk: the chunk, with any number of micro-batches in flight.
        sizer_of: returns the sizes of a run's blocks.
        workspace: the cuBLAS workspace that the first backward's first matmul allocates, if it is one of the passes.

    Raises:
        InputError: layers share a checkpoint segment under an engine with per-layer shards or buckets.
    """

    def __init__(
        self, spec: Spec, chunk: Stage, sizer_of: Callable[[Spec], ProgramSizer], workspace: RowDraft | None = None
    ) -> None:
        if has_segments(spec.training.recompute) and takes_gradients_over(state_options(spec)):
            raise InputError(
                f"recompute has segments of several layers, but engine = {spec.parallelism.engine} has "
                "per-layer buffers, which are not modelled for such segments.",
                "Recompute each layer separately: full, every-k or a list of numbers.",
                "training.recompute",
            )
        self._spec, self._chunk, self._workspace = spec, chunk, workspace
        self._layers, self._frozen = Layers(spec, chunk), _Frozen(spec, chunk)
        self._sizers = sizer_of(spec), self._frozen.sized(sizer_of)
        self._streams: dict[tuple[bool, bool, int | None], SizedStream] = {}

    def step(
        self,
        chunk: Stage,
        *,
        exist: bool,
        after_forward: bool = True,
        rank: int | None = None,
        beside: tuple[BesideStates, Moment] | None = None,
    ) -> RecordedPasses:
        """Return forward, loss and backward of the last micro-batch in flight.

        Args:
            chunk: the chunk with its micro-batches in flight.
            exist: whether gradients of earlier micro-batches exist.
            after_forward: whether a forward ran since the last backward.
            rank: the data-parallel rank, one of `ranks_that_may_hold_most`.
            beside: what the stage holds besides its states while the micro-batch runs, and the moment.
        """
        key = exist, after_forward, rank
        if key not in self._streams:
            self._streams[key] = self._stream(*key)
        rounds = rounds_of(chunk, self._layers, self._frozen.layers)
        return RecordedPasses(self._spec, chunk, self._streams[key], rounds, beside)

    def _stream(self, exist: bool, after_forward: bool, rank: int | None) -> SizedStream:
        spec, chunk, with_workspace = self._spec, self._chunk, self._workspace is not None

        def record() -> RecordedStream:
            recorder = StepRecorder(spec, chunk, workspace=with_workspace, rank=rank)
            return recorder.step(exist=exist, after_forward=after_forward)

        own = _key(spec, chunk, self._layers, exist=exist)
        recording = _recorded(
            RecordingInput(("step", own, with_workspace, self._frozen.key, rank, after_forward), record)
        )
        sizer, frozen = self._sizers
        return SizedStream(recording, sizer, frozen, self._workspace)


def recorded_evaluation(spec: Spec, chunk: Stage, sizer_of: Callable[[Spec], ProgramSizer]) -> RecordedPasses:
    """Return forward and loss of a batch outside autograd, between steps; as for `ChunkPasses`."""
    run = evaluated(spec)
    other = _Frozen(run, chunk)

    def record() -> RecordedStream:
        return StepRecorder(spec, chunk, workspace=False).evaluation()

    layers = Layers(run, chunk)
    key = "evaluation", _key(run, chunk, layers, exist=False), other.key
    rounds = rounds_of(chunk, layers, other.layers)
    recording = _recorded(RecordingInput(key, record))
    return RecordedPasses(run, chunk, SizedStream(recording, sizer_of(run), other.sized(sizer_of), None), rounds)


class PassPeak(NamedTuple):
    """The peak of a pass.

    Args:
        passes: the passes.
        peak: the peak.
        first: whether it is the first backward of the run.
        mask: bits of the phases that the pass stands for.
    """

    passes: RecordedPasses
    peak: IntervalPeak
    first: bool
    mask: int

    @property
    def bytes(self) -> int:
        """Live bytes, rounded to the allocator's blocks."""
        return self.peak.bytes + self.passes.beside_bytes(self.mask)

    def drafts(self, mask: int) -> list[RowDraft]:
        """Return rows of the live tensors, without gradients from before the pass, which are counted elsewhere.

        Args:
            mask: bits of the phases that the pass stands for.
        """
        live = live_at(self.passes.stream, self.peak, self.passes.rounds)
        found = [*self.passes.drafts_of(live, mask, first=self.first)]
        freed = sum(draft.count * draft.block for draft in found) - self.peak.bytes
        assert freed == 0 or (freed > 0 and self.passes.recording.takes_over)
        return [*beyond(freed, found), *self.passes.beside_in(self.mask)]


def of_engine(label: EngineTensor, sizes: Sequence[tuple[int, int]], mask: int) -> RowDraft:
    """Return the row of an engine's tensors.

    Args:
        label: the tensors' label.
        sizes: requested bytes of storages, with their number.
        mask: bits of the phases in which they are live.
    """
    storages = sum(count for _, count in sizes)
    requested = sum(size * count for size, count in sizes)
    blocks = sum(rounded(size) * count for size, count in sizes)
    count, rest = divmod(storages, label.pieces)
    if rest or requested % count or blocks % count:
        count = 1
    each, item = requested // count, DTYPE_BYTES[label.dtype]
    # _fsdp_collectives.py, _get_all_gather_input_metadatas: one uint8 buffer for several dtypes
    mixed = label.dtype == "uint8" and label.symbol.startswith("P")
    formula = f"{label.symbol}, each in its own dtype" if mixed else f"{item}·{label.symbol}"
    tensor = (label.component, "engine", label.tensor, (each // item,), label.dtype)
    return RowDraft(*tensor, count, each, blocks // count, mask, formula, label.source)


def beyond(freed: int, drafts: list[RowDraft]) -> list[RowDraft]:
    """Return the live tensors at a point, largest first, minus existing gradients that were freed before it."""
    for at in sorted(range(len(drafts)), key=lambda at: -drafts[at].count * drafts[at].block):
        draft = drafts[at]
        less = min(freed, draft.count * draft.block)
        if not less:
            break
        size, freed = draft.count * draft.block - less, freed - less
        name = f"{draft.tensor}, beyond freed gradients"
        drafts[at] = draft._replace(tensor=name, shape=(size,), dtype="uint8", count=1, each=size, block=size)
    return drafts
