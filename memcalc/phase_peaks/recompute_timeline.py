"""Forward, loss and backward under a recompute plan in which layers share a checkpoint segment, layer by layer.

`StageTimeline` relies on identical consecutive layers. Here each layer is simulated separately with the tensors that
the plan keeps live around it; the programs of the layers are the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from memcalc.architectures.catalogue import GradientPolicy, Part, program
from memcalc.errors import InputError
from memcalc.layout.stages import LayerType, Stage, starts_detached
from memcalc.phase_peaks.layer_buffers import PerLayerBuffers
from memcalc.phase_peaks.peak_candidates import Holding, PeakCandidate, is_before_product, live_storages, place
from memcalc.phase_peaks.timeline import StageTimeline
from memcalc.programs.program import Stream
from memcalc.programs.sized_program import ProgramSizer
from memcalc.spec.layers import applies_no_rope, has_mask
from memcalc.spec.recompute_plan import Segment, has_segments, items_of, leaves
from memcalc.spec.spec import Spec


class RecomputeTimeline(StageTimeline):
    """The transient tensors of a stage that holds the whole model.

    Args:
        spec: the run.
        stage: the pipeline stage.
        sizer: sizes of its blocks.
        gradients: what happens to each produced parameter gradient.
        around: the engine's per-layer buffers; empty where layers share a checkpoint segment.

    Raises:
        InputError: layers share a checkpoint segment under an engine with per-layer shards or buckets.
    """

    def __init__(
        self, spec: Spec, stage: Stage, sizer: ProgramSizer, gradients: GradientPolicy, around: PerLayerBuffers
    ) -> None:
        if around != PerLayerBuffers() and has_segments(spec.training.recompute):
            raise InputError(
                f"recompute has segments of several layers, but engine = {spec.parallelism.engine} has "
                "per-layer buffers, which are not modelled for such segments.",
                "Recompute each layer separately: full, every-k or a list of numbers.",
                "training.recompute",
            )
        super().__init__(spec, stage, sizer, gradients, around)
        self.inside: dict[int, int] = {}  # block of a kept layer -> block of the same layer inside a segment
        head = self.blocks.pop()
        for number, block in enumerate(tuple(self.blocks)):
            if block.kind is not None and not block.kind.recomputed:
                self.inside[number] = len(self.blocks)
                structure = self.structure().of_layers(block.kind)
                part: Part = "expert layer" if block.kind.experts else "dense layer"
                again = program(structure, part, False, gradients, True)
                self.blocks.append(block._replace(program=again, sized=sizer.sized(again)))
        self.blocks.append(head)
        recompute = spec.training.recompute
        self.plan = items_of(() if isinstance(recompute, str) else recompute, spec.model.num_layers)

    def kinds(self) -> list[LayerType]:
        """Return every layer type twice, kept and recomputed."""
        layers = range(self.stage.first, self.stage.stop)
        found: dict[tuple[bool, ...], list[int]] = {}
        for layer in layers:
            found.setdefault(self._alike(layer), []).append(layer)
        return [
            LayerType(experts, again, masked, unturned, linear, len(alike), alike[0], alike[-1], detached)
            for (experts, masked, unturned, linear, detached), alike in found.items()
            for again in (False, True)
        ]

    def _alike(self, layer: int) -> tuple[bool, ...]:
        moe = self.spec.model.moe
        experts = moe is not None and moe.has_experts(layer)
        detached = layer == 0 and starts_detached(self.spec)
        masked, unturned = has_mask(self.spec, layer), applies_no_rope(self.spec, layer)
        return experts, masked, unturned, self.spec.model.is_linear(layer), detached

    def block_of(self, layer: int, *, again: bool) -> int:
        """Return the number of a layer's block: kept, or recomputed with no other layer in its segment after it."""
        alike = self._alike(layer)
        return next(
            number
            for number, block in enumerate(self.blocks)
            if (layer_type := block.kind) is not None and layer_type.recomputed is again
            if (layer_type.experts, layer_type.masked, layer_type.without_rope, layer_type.linear, layer_type.detached)
            == alike
        )

    # -- the three phases ----------------------------------------------------------------------------------------------

    def _loss_moments(self) -> Iterator[PeakCandidate]:
        walk = _StepSimulation(self)
        walk.forward()
        walk.phase = "loss"
        yield from walk.at(len(self.blocks) - 1, "loss")

    def _forward_moments(self) -> Iterator[PeakCandidate]:
        return iter(_StepSimulation(self).forward())

    def _backward_moments(self) -> Iterator[PeakCandidate]:
        walk = _StepSimulation(self)
        walk.forward()
        return iter(walk.backward())


class _StepSimulation:
    """A step simulated layer by layer: the live storages, and the points that may be the peak."""

    def __init__(self, timeline: RecomputeTimeline) -> None:
        self.timeline = timeline
        self.blocks = timeline.blocks
        self.phase = "forward"
        self.saved: Counter[tuple[int, bool]] = Counter()  # (block, whether the segment has freed its input) -> count
        self.given: Counter[int] = Counter()  # blocks with an input that only a checkpoint still references
        self.left: Counter[int] = Counter()  # blocks that have left gradients
        self.moments: list[PeakCandidate] = []
        self.layer = timeline.stage.stop  # backward has reached this layer

    def forward(self) -> list[PeakCandidate]:
        """Simulate forward and return its points; the saved tensors stay live for the loss and backward."""
        for number, block in enumerate(self.blocks):
            if block.opens:
                self.moments += self.at(number, "forward")
                self.saved[number, False] += 1
        for item in self.timeline.plan:
            self.run(item)
        self.moments += self.at(len(self.blocks) - 1, "forward")
        return self.moments

    def backward(self) -> list[PeakCandidate]:
        """Simulate backward and return its points."""
        self.phase, self.moments = "backward", []
        self.turn(len(self.blocks) - 1)
        self.reverse(self.timeline.plan)
        for number in reversed(range(len(self.blocks))):
            if self.blocks[number].opens:
                self.saved[number, False] -= 1
                self.turn(number)
        return self.moments

    def block_of(self, layer: int, item: int | Segment, *, inside: bool) -> int:
        """Return the block of a layer that belongs to an item, which may itself be inside a segment."""
        number = self.timeline.block_of(layer, again=not isinstance(item, int))
        return self.timeline.inside[number] if inside and isinstance(item, int) else number

    def run(self, item: int | Segment, *beside: Holding) -> None:
        """Simulate the forward of a kept layer, or of a segment, which keeps only its input."""
        for index, layer in enumerate(leaves(item)):
            number = self.block_of(layer, item, inside=bool(beside))
            self.moments += self.at(number, "forward", *beside)
            self.saved[number, index > 0] += 1

    def reverse(self, items: Segment, *, inside: bool = False) -> None:
        """Simulate the backward of items after their forward."""
        for item in reversed(items):
            self.layer = min(self.layer, next(leaves(item)))
            for index, layer in enumerate(leaves(item)):
                self.saved[self.block_of(layer, item, inside=inside), index > 0] -= 1
            if isinstance(item, int):
                self.turn(self.block_of(item, item, inside=inside))
            else:
                self.again(item)

    def again(self, items: Segment) -> None:
        """Recompute a segment and run its backward; the last layer's program does both at once."""
        last = items[-1]
        end = self.timeline.block_of([*leaves(items)][-1], again=True)
        gradient = self.blocks[end].program.backward[0].storage
        before = items[:-1] if isinstance(last, int) else items
        given = self.given_to(items[0]) if before else None
        for item in before:
            self.run(item, (end, (gradient,), 1))
            if item is items[0] and given is not None:
                self.given[given] += 1
        if isinstance(last, int):
            self.turn(end)
        self.reverse(before, inside=True)
        if given is not None:
            self.given[given] -= 1

    def given_to(self, first: int | Segment) -> int | None:
        """Return the block that a segment's input is passed to, or None if the block saves the input itself.

        A checkpoint holds its arguments until the backward of everything it has recomputed is done
        (torch/utils/checkpoint.py, _CheckpointFrame's recompute_fn).
        """
        if not isinstance(first, int):
            return None
        number = self.block_of(first, first, inside=True)
        program = self.blocks[number].program
        return None if program.entry in program.kept else number

    def turn(self, number: int) -> None:
        """Simulate the backward of a block."""
        self.moments += self.at(number, "backward")
        self.left[number] += 1

    def at(self, number: int, stream: Stream, *beside: Holding) -> Iterator[PeakCandidate]:
        """Yield the points that may be the peak of one of a block's streams, with everything live around it."""
        block = self.blocks[number]
        events = block.program.stream(stream)
        around = [*beside, *self.held_around()]
        for position in block.sized.highest(stream):
            holdings = [(number, block.program.alive(stream, position), 1), *around]
            early = stream == "backward" and is_before_product(block, position)
            yield PeakCandidate(holdings, (), place(block, events, position), early)

    def held_around(self) -> Iterator[Holding]:
        """Yield the live storages of all blocks while one runs."""
        for (other, dropped), count in self.saved.items():
            program = self.blocks[other].program
            storages = live_storages(program, self.phase)
            if self.phase == "backward" and self.blocks[other].opens:
                storages = self.timeline.still_read(storages, self.layer)
            if dropped:
                storages = tuple(storage for storage in storages if storage not in program.kept)
            if count and storages:
                yield other, storages, count
        for other, count in self.given.items():
            if count:
                yield other, (self.blocks[other].program.entry,), count
        for other, count in self.left.items():
            if count:
                yield other, self.blocks[other].left, count
