"""Candidates for the peak of one stage's forward and loss."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.layout.local_parameters import stage_parameters
from memcalc.layout.stages import count_between
from memcalc.ledger.row_drafts import RowDraft
from memcalc.phase_peaks.peak_candidates import PeakCandidate, SizedBlock, place
from memcalc.phase_peaks.stage_blocks import StageBlocks
from memcalc.phase_peaks.zero3_param_coordinator import gathered
from memcalc.programs.program import Activity


class ForwardPeak(StageBlocks):
    """Points in forward and loss that may be the peak."""

    def _forward_moments(self) -> Iterator[PeakCandidate]:
        for index, block in enumerate(self.blocks):
            layer = self.stage.first if block.kind is None else block.kind.last
            if block.part == "head":
                layer = self.stage.stop
                yield from self._arrival_of_head(index, block)
            engine = self.around.forward_head if block.part == "head" else ()
            if block.kind is not None:
                engine = self.around.forward_layer
                yield from self._arrivals(index, block)
                yield from self._widest(index, block)
            items = (*((item, 1) for item in engine), *self._gathered(layer))
            for phase, among in self._parts(block):
                saved = self._saved(index, layer, phase)
                for position in self.peak_positions(block, "forward", among=among):
                    alive = block.program.alive("forward", position)
                    yield PeakCandidate(
                        [*saved, (index, alive, 1)], items, place(block, block.program.forward, position)
                    )

    def _parts(self, block: SizedBlock) -> Iterator[tuple[str, frozenset[int] | None]]:
        """Yield the positions of a block's forward, with the phase that sets what earlier blocks hold meanwhile.

        Tensors that only the model's Python variables reference are freed before the LM head's matmul.
        """
        if block.part != "head" or not any(each.program.names for each in self.blocks):
            yield "forward", None
            return
        events = block.program.forward
        inside = next((at for at, event in enumerate(events) if event.operator.in_head), len(events))
        if block.program.packed:
            inside = 0
        if inside:
            yield "forward", frozenset(range(1, inside + 1))
        if inside < len(events):
            yield "loss", frozenset(range(inside + 1, len(events) + 1))

    def _widest(self, index: int, block: SizedBlock) -> Iterator[PeakCandidate]:
        """Yield the peak in the layer that gathers most in forward, if it has this layer type and is not the last."""
        if not self.around.forward_widest or block.kind is None:
            return
        recomputes = self.spec.training.recompute == "full"
        found = gathered(
            stage_parameters(self.spec, self.stage), self.spec.parallelism.zero_optimization, recomputes=recomputes
        )
        layer = self.stage.first + found.widest_forward
        if layer < self.stage.stop - 1 and count_between(self.spec, block.kind, layer, layer + 1):
            engine = (*((item, 1) for item in self.around.forward_widest), *self._gathered(layer))
            saved = self._saved(index, layer, "forward")
            for position in self.peak_positions(block, "forward"):
                alive = block.program.alive("forward", position)
                yield PeakCandidate([*saved, (index, alive, 1)], engine, place(block, block.program.forward, position))

    def _arrivals(self, index: int, block: SizedBlock) -> Iterator[PeakCandidate]:
        """Yield the points before a layer's forward where the engine copies its parameters out of the all-gather."""
        if not self.around.before_layer or block.kind is None:
            return
        given = tuple(event.storage for event in block.program.forward if event.operator.when is Activity.START)
        for layer in sorted({block.kind.first, block.kind.last}):
            first = layer == self.stage.first
            engine = self.around.before_first_layer if first else self.around.before_layer
            holdings = [*self._saved(index, layer, "forward"), (index, given, 1)]
            items = (*((item, 1) for item in engine), *self._gathered(layer))
            yield PeakCandidate(holdings, items, f"{block.name}: parameters gathered")

    def _arrival_of_head(self, index: int, block: SizedBlock) -> Iterator[PeakCandidate]:
        """Yield the point before the LM head's forward where the engine copies its parameters out of the all-gather."""
        if not self.around.before_head:
            return
        given = tuple(event.storage for event in block.program.forward if event.operator.when is Activity.START)
        holdings = [*self._saved(index, self.stage.stop, "forward"), (index, given, 1)]
        items = (*((item, 1) for item in self.around.before_head), *self._gathered(self.stage.stop))
        yield PeakCandidate(holdings, items, f"{block.name}: parameters gathered")

    def after_loss(self, beside: tuple[tuple[RowDraft, int], ...]) -> PeakCandidate:
        """The moment between loss and backward, with what another model holds then."""
        saved = self._saved(len(self.blocks), self.stage.stop, "backward")
        return PeakCandidate(saved, (*beside, *self._gathered(self.stage.stop)), "forward of the reference model")

    def _loss_moments(self) -> Iterator[PeakCandidate]:
        if not self.stage.has_head:
            saved = self._saved(len(self.blocks), self.stage.stop, "loss")
            yield PeakCandidate(saved, self._gathered(self.stage.stop), "end of forward")
            return
        head = len(self.blocks) - 1
        block = self.blocks[head]
        saved = self._saved(head, self.stage.stop, "loss")
        beside = (*self.around.loss_and_head, *self.around.in_loss)
        engine = (*((item, 1) for item in beside), *self._gathered(self.stage.stop))
        for position in self.peak_positions(block, "loss"):
            yield PeakCandidate([*saved, (head, block.program.alive("loss", position), 1)], engine, "loss")
