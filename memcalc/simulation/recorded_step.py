"""The transient tensors of a step, as requests: forward, loss and backward of the last micro-batch in flight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

from memcalc.layout.local_parameters import stage_parameters
from memcalc.layout.parameters import layer_prefixes
from memcalc.layout.stages import Stage
from memcalc.ledger.component import Component
from memcalc.ledger.row_drafts import RowDraft
from memcalc.programs.sized_program import ProgramSizer
from memcalc.sharding.engine import ROOT, Engine, by_unit
from memcalc.simulation.forward_backward import ForwardBackward
from memcalc.simulation.layer_loops import LayerLoop, loops_of, of_layers
from memcalc.simulation.simulated_run import arriving_gradients, engine_of, gradient_name, plan_of
from memcalc.simulation.stage_blocks import SizedBlock, StageBlocks
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.spec.recompute_plan import leaves
from memcalc.spec.spec import Spec
from memcalc.states import megatron_buffers
from memcalc.states.optimizers.parameter_order import in_order
from memcalc.states.state_options import state_options
from memcalc.stream.peaks import Peak, live_at, peaks
from memcalc.stream.requests import Label, Requests, TensorLabel

EXISTING, IN_FLIGHT = "existing", "in flight"  # what earlier micro-batches have left; what others hold meanwhile
THREADS = ("forward", "backward")  # with a cuBLAS workspace each


class RecordedStep:
    """The requests of one chunk of a stage.

    Args:
        spec: the run.
        chunk: the chunk.
        sizer: sizes of its blocks.
        exist: whether gradients of earlier micro-batches exist.
        workspace: the cuBLAS workspace that backward's first matmul allocates, if it is to be recorded.
        loops: whether equal rounds of layers are one loop.
    """

    def __init__(
        self,
        spec: Spec,
        chunk: Stage,
        sizer: ProgramSizer,
        *,
        exist: bool,
        workspace: RowDraft | None = None,
        loops: bool = True,
    ) -> None:
        self.requests = Requests()
        self.blocks: list[SizedBlock] = []
        self.spec, self.chunk, self.sizer, self.loops = spec, chunk, sizer, loops
        self.workspace = workspace
        self.requests.begin(EXISTING)
        walk, gradients = self._walk(spec, exist=exist)
        self.takes_over = bool(self.requests.labels)  # gradients that exist before it
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
        self.requests.begin("backward")
        gradients += walk.backward(self._received_gradient())
        walk.engine.after_last_backward(gradients)

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
        parameters = of_layers(stage_parameters(spec, self.chunk), spec, self.chunk, layers)
        ordered = tuple(in_order(parameters, options.update.family, layer_prefixes(spec.model, layers)))
        units = by_unit(ordered, layers, ends=options.wraps_embedding_and_head)
        sharded = options.partitions_gradients or (options.engine == "fsdp2" and options.data_parallel > 1)
        engine = engine_of(self.requests, ordered, units, spec) if sharded else Engine(self.requests)
        existing = engine.existing() if exist else []
        parts = StageBlocks(
            spec,
            self.chunk,
            self.sizer,
            arriving_gradients(spec, engine, exist=exist),
            plan,
            blocks=self.blocks,
            without_gradients=not gradients,
        )
        names = {
            unit: {gradient_name(each, spec.training.implementation): each for each in found}
            for unit, found in units.items()
        }
        if spec.model.tie_word_embeddings and spec.parallelism.pipeline_parallel == 1:
            names[ROOT].setdefault("lm_head.weight", units[ROOT][0])
        threads = THREADS if self.workspace is None else THREADS[:1]
        size = 0 if self.workspace is None else self.workspace.each
        walk = ForwardBackward(self.requests, parts, played, engine, names, size, set(threads))
        return walk, existing

    def _hold_in_flight(self, walk: ForwardBackward) -> None:
        for number, storages, count in walk.parts.in_flight():
            with self.requests.repeat(count):
                for at in storages if count else ():
                    self.requests.take(self.blocks[number].sized.exact[at], 0, walk.labels_of(number)[at])

    def _received(self, walk: ForwardBackward) -> int:
        """Allocate the input of a stage without embedding; return its storage."""
        if self.chunk.has_embedding:
            return -1
        number, entry = walk.parts.entry
        return self.requests.take(self.blocks[number].sized.exact[entry], 0, walk.labels_of(number)[entry])

    def _received_gradient(self) -> int:
        """Allocate the gradient of a stage's output where Megatron-LM references it until backward has ended."""
        if self.chunk.has_head or self.spec.training.implementation != "megatron":
            return -1
        received = megatron_buffers.received_gradient(self.spec)
        storage = self.requests.take(received.each, 0, received)
        self.requests.hold(storage)
        return storage

    @cached_property
    def peaks(self) -> dict[str, Peak]:
        """The peaks of forward, loss and backward."""
        found = peaks(self.requests)
        phases = [interval.phase for interval in self.requests.stretches]
        begun = found[phases.index(EXISTING)].bytes  # counted with the model states
        return {phase: peak._replace(bytes=peak.bytes - begun) for phase, peak in zip(phases, found, strict=True)}

    def drafts(self, peak: Peak) -> list[RowDraft]:
        """Return what is live at a peak, except gradients that exist before it, which are counted elsewhere."""
        found = [*self._drafts(live_at(self.requests, peak))]
        freed = sum(draft.count * draft.block for draft in found) - peak.bytes
        assert freed == 0 or (freed > 0 and self.takes_over)
        return beyond(freed, found)

    def _drafts(self, live: Mapping[Label, int]) -> Iterator[RowDraft]:
        engine: dict[tuple[str, str], list[RowDraft]] = {}
        for label, count in live.items():
            if isinstance(label, TensorLabel):
                yield from self._draft(label, count)
            elif isinstance(label, RowDraft):
                engine.setdefault((label.tensor, label.dtype), []).append(label._replace(count=count))
            elif label is Component.LIBRARY_WORKSPACE and self.workspace is not None:
                yield self.workspace._replace(count=count)
            elif not (self.takes_over and label is Component.GRADIENTS):
                raise ValueError(label)
        for several in engine.values():
            yield from _joined(several)

    def _draft(self, label: TensorLabel, count: int) -> Iterator[RowDraft]:
        block, at = self.blocks[label.block], label.storage
        each = block.sized.exact[at]
        if each:
            component, name, dtype, formula, citation = block.program.labels[at]
            shape = block.sized.shapes[at] or (each // DTYPE_BYTES[dtype],)
            size = block.sized.sizes[at]
            yield RowDraft(component, block.module, name, shape, dtype, count, each, size, 0, formula, citation)


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


def _joined(drafts: list[RowDraft]) -> list[RowDraft]:
    """Join tensors of an engine that are always live together, such as the gathered parameters of a layer."""
    first = drafts[0]
    if any(draft.count != first.count for draft in drafts):
        return drafts
    shape = (sum(draft.shape[0] for draft in drafts),)
    each, block = sum(draft.each for draft in drafts), sum(draft.block for draft in drafts)
    return [first._replace(shape=shape, each=each, block=block)]
