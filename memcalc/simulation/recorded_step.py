"""The transient tensors of a step, as requests: forward, loss and backward of the last micro-batch in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

from memcalc.layout.local_parameters import stage_parameters, without_companions
from memcalc.layout.parameters import layer_prefixes
from memcalc.layout.stages import Stage
from memcalc.ledger.component import Component
from memcalc.ledger.row_drafts import EVALUATION, RowDraft
from memcalc.programs.sized_program import ProgramSizer
from memcalc.sharding.engine import by_unit
from memcalc.sharding.engines import arriving_gradients, engine_of, gradient_names
from memcalc.simulation.evaluation import evaluated, reference_run, scored_by_reference
from memcalc.simulation.forward_backward import ForwardBackward
from memcalc.simulation.layer_loops import LayerLoop, loops_of, of_layers
from memcalc.simulation.plans import plan_of
from memcalc.simulation.stage_blocks import SizedBlock, StageBlocks
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.spec.recompute_plan import leaves
from memcalc.spec.spec import Spec
from memcalc.states.optimizers.parameter_order import in_order
from memcalc.states.state_options import state_options
from memcalc.stream.peaks import Live, StretchPeak, live_at, peaks
from memcalc.stream.requests import EngineTensor, Label, Requests, TensorLabel

EXISTING, IN_FLIGHT = "existing", "in flight"  # what earlier micro-batches have left; what others hold meanwhile
THREADS = ("forward", "backward")  # with a cuBLAS workspace each


class RecordedPasses:
    """Requests of one chunk of a stage, and the peak of each pass.

    Args:
        spec: the run.
        chunk: the chunk.
        sizer_of: returns the sizes of a run's blocks.
        loops: whether equal rounds of layers are one loop.
    """

    def __init__(
        self, spec: Spec, chunk: Stage, sizer_of: Callable[[Spec], ProgramSizer], *, loops: bool = True
    ) -> None:
        self.requests = Requests()
        self.blocks: list[SizedBlock] = []
        self.spec, self.chunk, self.sizer_of, self.loops = spec, chunk, sizer_of, loops
        self.workspace: RowDraft | None = None
        self.takes_over = False  # whether an engine takes over gradients that exist before it

    def peak(self, phase: str, *, first: bool = False) -> PassPeak:
        """Return the peak of a pass; see `of_step`."""
        requests, found = self._of_first if first else self._of_others
        return PassPeak(self, requests, found[phase])

    def of_step(self, *, first: bool) -> Requests:
        """Return the requests of a step.

        Args:
            first: whether its backward is the first of the run, which allocates cuBLAS's workspace.
        """
        return (self._of_first if first else self._of_others)[0]

    @cached_property
    def _of_first(self) -> tuple[Requests, dict[str, StretchPeak]]:
        return self.requests, self._peaks(self.requests)

    @cached_property
    def _of_others(self) -> tuple[Requests, dict[str, StretchPeak]]:
        if self.workspace is None:
            return self._of_first
        others = self.requests.without_once()
        return others, self._peaks(others)

    @staticmethod
    def _peaks(requests: Requests) -> dict[str, StretchPeak]:
        found = peaks(requests)
        phases = [interval.phase for interval in requests.stretches]
        begun = found[phases.index(EXISTING)].bytes  # counted with the model states
        return {phase: peak._replace(bytes=peak.bytes - begun) for phase, peak in zip(phases, found, strict=True)}

    def _walk(self, spec: Spec, *, exist: bool, gradients: bool = True) -> tuple[ForwardBackward, list[int]]:
        """Return the walk through a micro-batch, and the gradients that exist before it and that its engine takes over.

        Args:
            spec: the run.
            exist: whether gradients of earlier micro-batches exist.
            gradients: whether autograd is on.
        """
        options, plan = state_options(spec), plan_of(spec, self.chunk)
        as_loops = self.loops and not options.partitions_gradients  # DeepSpeed's buckets and prefetches span layers
        played = loops_of(spec, plan) if as_loops else (LayerLoop(plan),)
        layers = [layer for loop in played for item in loop.items for layer in leaves(item)]
        parameters = of_layers(without_companions(stage_parameters(spec, self.chunk)), spec, self.chunk, layers)
        ordered = tuple(in_order(parameters, options.update.family, layer_prefixes(spec.model, layers)))
        units = by_unit(ordered, layers, ends=options.wraps_embedding_and_head)
        engine = engine_of(self.requests, ordered, units, spec, plan)
        engine.rounds = {layer: loop.rounds for loop in played for item in loop.items for layer in leaves(item)}
        existing = engine.existing() if exist else []
        parts = StageBlocks(
            spec,
            self.chunk,
            self.sizer_of(spec),
            arriving_gradients(spec, engine, exist=exist),
            plan,
            blocks=self.blocks,
            without_gradients=not gradients,
        )
        names = gradient_names(spec, units)
        threads = THREADS if self.workspace is None else THREADS[:1]
        size = 0 if self.workspace is None else self.workspace.each
        given = (self.requests, parts, played, engine, names, size, set(threads))
        return ForwardBackward(*given, splits_workspaces=False), existing

    def _forward_alone(self, spec: Spec) -> None:
        """Record a forward pass and its loss outside autograd."""
        walk, _ = self._walk(spec, exist=False, gradients=False)
        walk.engine.resume()
        walk.engine.begin(have_gradients=False, last=True)
        walk.forward(self._received(walk))
        if self.chunk.has_head:
            walk.loss()
        else:
            self.requests.drop([walk.output])
        walk.release()
        walk.engine.after_evaluation()

    def _received(self, walk: ForwardBackward) -> int:
        """Allocate the input of a stage without embedding; return its storage."""
        if self.chunk.has_embedding:
            return -1
        number, entry = walk.parts.entry
        return self.requests.take(self.blocks[number].sized.exact[entry], 0, walk.labels_of(number)[entry])

    def drafts_of(self, live: Mapping[Label, Live]) -> Iterator[RowDraft]:
        """Yield rows of live storages."""
        for label, found in live.items():
            if isinstance(label, TensorLabel):
                yield from self._of_block(label, found)
            elif isinstance(label, EngineTensor):
                yield of_engine(label, found)
            elif isinstance(label, RowDraft):
                yield label._replace(count=found.count)
            elif label is Component.LIBRARY_WORKSPACE and self.workspace is not None:
                yield self.workspace._replace(count=found.count)
            elif not (self.takes_over and label is Component.GRADIENTS):
                raise ValueError(label)

    def _of_block(self, label: TensorLabel, live: Live) -> Iterator[RowDraft]:
        block, at, count = self.blocks[label.block], label.storage, live.count
        each, size = block.sized.exact[at], block.sized.sizes[at]
        if (live.requested, live.blocks) != (count * each, count * size):  # buffers inside an operator
            count, each, size = 1, live.requested, live.blocks
        if each:
            _, name, dtype, formula, citation = block.program.labels[at]
            shape = block.sized.shapes[at] or (each // DTYPE_BYTES[dtype],)
            yield RowDraft(label.component, block.module, name, shape, dtype, count, each, size, 0, formula, citation)


class RecordedStep(RecordedPasses):
    """Forward, loss and backward of the last micro-batch in flight.

    Args:
        spec: the run.
        chunk: the chunk of a stage.
        sizer_of: returns the sizes of a run's blocks.
        exist: whether gradients of earlier micro-batches exist.
        workspace: the cuBLAS workspace that the first backward's first matmul allocates, if it is one of its passes.
        loops: whether equal rounds of layers are one loop.
    """

    def __init__(
        self,
        spec: Spec,
        chunk: Stage,
        sizer_of: Callable[[Spec], ProgramSizer],
        *,
        exist: bool,
        workspace: RowDraft | None = None,
        loops: bool = True,
    ) -> None:
        super().__init__(spec, chunk, sizer_of, loops=loops)
        self.workspace = workspace
        self.requests.begin(EXISTING)
        walk, gradients = self._walk(spec, exist=exist)
        self.takes_over = bool(self.requests.labels)
        self.requests.begin(IN_FLIGHT)
        walk.engine.resume()
        self._hold_in_flight(walk)
        self.requests.begin("forward")
        walk.engine.prepare()
        walk.engine.begin(have_gradients=exist, last=True)
        walk.forward(self._received(walk))
        if not chunk.has_head:
            self.requests.drop([walk.output])  # sent; a stage's buffers for it are counted with its persistent memory
        self.requests.begin("loss")
        if chunk.has_head:
            walk.loss()
            if scored_by_reference(spec):
                self._forward_alone(reference_run(spec))
        self.requests.begin("backward")
        gradients += walk.backward(self._received_gradient(walk))
        walk.engine.after_last_backward(gradients)

    def _hold_in_flight(self, walk: ForwardBackward) -> None:
        for number, storages, count in walk.parts.in_flight():
            with self.requests.repeat(count):
                for at in storages if count else ():
                    self.requests.take(self.blocks[number].sized.exact[at], 0, walk.labels_of(number)[at])

    def _received_gradient(self, walk: ForwardBackward) -> int:
        """Allocate the gradient of a stage's output where Megatron-LM references it until backward has ended.

        Source: Megatron-LM core_r0.14 core/pipeline_parallel/schedules.py, backward_step(output_tensor_grad).
        """
        if self.chunk.has_head or self.spec.training.implementation != "megatron":
            return -1
        number = walk.layers[self.chunk.stop - 1].number
        start = self.blocks[number].program.backward[0].storage
        storage = self.requests.take(self.blocks[number].sized.exact[start], 0, walk.labels_of(number)[start])
        self.requests.hold(storage)
        return storage


class RecordedEvaluation(RecordedPasses):
    """Forward and loss of a batch outside autograd, between steps."""

    def __init__(
        self, spec: Spec, chunk: Stage, sizer_of: Callable[[Spec], ProgramSizer], *, loops: bool = True
    ) -> None:
        super().__init__(spec, chunk, sizer_of, loops=loops)
        self.requests.begin(EXISTING)
        self.requests.begin(EVALUATION)
        self._forward_alone(evaluated(spec))


class PassPeak(NamedTuple):
    """The peak of a pass, and the requests in which it is."""

    passes: RecordedPasses
    requests: Requests
    peak: StretchPeak

    @property
    def bytes(self) -> int:
        """Live bytes, rounded to the allocator's blocks."""
        return self.peak.bytes

    def drafts(self) -> list[RowDraft]:
        """Return what is live, except gradients that exist before the pass, which are counted elsewhere."""
        found = [*self.passes.drafts_of(live_at(self.requests, self.peak))]
        freed = sum(draft.count * draft.block for draft in found) - self.bytes
        assert freed == 0 or (freed > 0 and self.passes.takes_over)
        return beyond(freed, found)


def of_engine(label: EngineTensor, live: Live) -> RowDraft:
    """Return the row of an engine's tensors."""
    count, rest = divmod(live.count, label.pieces)
    if rest or live.requested % count or live.blocks % count:
        count = 1
    each, block = live.requested // count, live.blocks // count
    size = DTYPE_BYTES[label.dtype]
    # _fsdp_collectives.py, _get_all_gather_input_metadatas: one uint8 buffer for several dtypes
    formula = f"{label.symbol}, each in its own dtype" if label.dtype == "uint8" else f"{size}·{label.symbol}"
    return RowDraft(
        label.component,
        "engine",
        label.tensor,
        (each // size,),
        label.dtype,
        count,
        each,
        block,
        0,
        formula,
        label.source,
    )


def beyond(freed: int, drafts: list[RowDraft]) -> list[RowDraft]:
    """Return the tensors of a point less memory of existing gradients that was freed before it, largest first."""
    for at in sorted(range(len(drafts)), key=lambda at: -drafts[at].count * drafts[at].block):
        draft = drafts[at]
        less = min(freed, draft.count * draft.block)
        if not less:
            break
        size, freed = draft.count * draft.block - less, freed - less
        name = f"{draft.tensor}, beyond freed gradients"
        drafts[at] = draft._replace(tensor=name, shape=(size,), dtype="uint8", count=1, each=size, block=size)
    return drafts
