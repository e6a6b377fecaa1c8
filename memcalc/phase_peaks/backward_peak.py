"""Candidates for the peak of one stage's backward."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from memcalc.layout.local_parameters import stage_parameters
from memcalc.layout.stages import count_between
from memcalc.ledger.row_drafts import RowDraft
from memcalc.phase_peaks.peak_candidates import PeakCandidate, SizedBlock, is_before_product, place
from memcalc.phase_peaks.peak_layers import PeakLayers
from memcalc.phase_peaks.zero_reduce_bucket import first_layer


class BackwardPeak(PeakLayers):
    """Points in backward that may be the peak."""

    def _backward_with(self, workspace: RowDraft | None) -> Iterator[PeakCandidate]:
        for candidate in self._backward:
            if workspace is not None and not candidate.before_matmul:
                yield candidate._replace(engine=(*candidate.engine, (workspace, 1)))
            else:
                yield candidate

    @cached_property
    def _backward(self) -> tuple[PeakCandidate, ...]:
        return tuple(self._backward_moments())

    def _backward_moments(self) -> Iterator[PeakCandidate]:
        for index, block in enumerate(self.blocks):
            events = block.program.backward
            tops = list(self.peak_positions(block, "backward"))
            for layer in self._turning_points(block):
                holdings = self._saved(index, layer, "backward") + self._behind(index, layer)
                sent_for = self._before(block, layer)
                if sent_for:
                    given = block.program.alive("backward", 1)  # saved tensors and the incoming gradient
                    engine = self._engine_behind(block, layer, beside=(*self._around(layer, after=False), *sent_for))
                    yield PeakCandidate([*holdings, (index, given, 1)], engine, f"{block.name}: parameters gathered")
                engine = self._engine_behind(block, layer)
                for position in tops:
                    alive = block.program.alive("backward", position)
                    early = is_before_product(block, position)
                    yield PeakCandidate([*holdings, (index, alive, 1)], engine, place(block, events, position), early)
                if block.kind is not None and self.around.after_layer:
                    done = block.program.alive("backward", len(events) - 1)
                    engine = self._engine_behind(block, layer, after=True)
                    yield PeakCandidate([*holdings, (index, done, 1)], engine, f"{block.name}: gradients reduced")
            if block.kind is not None and self.around.on_gradient:
                yield from self._on_gradients(index, block)
            if block.part == "embedding":
                yield from self._after_embedding(index, block)
            if block.part == "head" and self.around.after_head:
                yield self._after_head(index, block)
            if block.part == "head" and self.around.backward_head:
                yield from self._after_first_gradient(index, block)
            if block.part == "head" and self.around.second_of_head:
                yield from self._on_later_gradients(index, block)

    def _on_gradients(self, index: int, block: SizedBlock) -> Iterator[PeakCandidate]:
        """Yield the points where a layer's gradient was just produced while the engine still reduces others.

        Starts with the first layer at which the engine's bucket is full.
        """
        full = first_layer(
            stage_parameters(self.spec, self.stage), self.spec.parallelism.zero_optimization.reduce_bucket_size
        )
        for layer in self._turning_points(block, self.stage.stop if full is None else self.stage.first + full + 1):
            holdings = self._saved(index, layer, "backward") + self._behind(index, layer)
            engine = self._engine_behind(block, layer, beside=self.around.on_gradient)
            for position in self.peak_positions(block, "backward", among=block.program.gradients):
                made = block.program.alive("backward", position)
                where = place(block, block.program.backward, position)
                yield PeakCandidate([*holdings, (index, made, 1)], engine, where)

    def _after_embedding(self, index: int, block: SizedBlock) -> Iterator[PeakCandidate]:
        """Yield the points where the embedding's gradient, and then all gradients, are complete and not yet reduced."""
        before, length = self.stage.first - 1, len(block.program.backward)
        holdings = self._saved(index, before, "backward") + self._behind(index, before)
        if self.around.gradient_of_embedding:
            # The last event frees the gradient; of tied weights, the gradient that the LM head has left.
            arrived = block.program.alive("backward", length - 1)
            beside = (*self.around.backward_embedding, *self.around.gradient_of_embedding)
            engine = self._engine_behind(block, before, beside=beside)
            yield PeakCandidate([*holdings, (index, arrived, 1)], engine, f"{block.name}: gradient received")
        if self.around.after_embedding:
            if self.delivers:  # the tied LM head's gradient too
                holdings = self._saved(index, before, "backward") + [
                    (later, self.blocks[later].program.left_without_gradients, count)
                    for later, _, count in self._behind(index, before)
                ]
            done = block.program.alive("backward", length)
            engine = self._engine_behind(block, before, after=True)
            yield PeakCandidate([*holdings, (index, done, 1)], engine, f"{block.name}: gradients reduced")

    def _after_head(self, index: int, block: SizedBlock) -> PeakCandidate:
        """Return the point where all gradients of an LM head that is an FSDP unit are complete and not yet reduced."""
        layer, length = self.stage.stop, len(block.program.backward)
        holdings = self._saved(index, layer, "backward") + self._behind(index, layer)
        done = block.program.alive("backward", length)
        engine = self._engine_behind(block, layer, after=True)
        return PeakCandidate([*holdings, (index, done, 1)], engine, f"{block.name}: gradients reduced")

    def _on_later_gradients(self, index: int, block: SizedBlock) -> Iterator[PeakCandidate]:
        """Yield the points where a gradient of the LM head's unit other than the first was just produced."""
        later = block.program.gradients - {min(block.program.gradients, default=0)}
        if not later:
            return
        holdings = self._saved(index, self.stage.stop, "backward") + self._behind(index, self.stage.stop)
        beside = (*self.around.backward_head, *self.around.second_of_head, *self.around.loss_and_head)
        engine = (*((item, 1) for item in beside), *self._gathered(self.stage.stop))
        for position in self.peak_positions(block, "backward", among=later):
            made = block.program.alive("backward", position)
            where, early = place(block, block.program.backward, position), is_before_product(block, position)
            yield PeakCandidate([*holdings, (index, made, 1)], engine, where, early)

    def _after_first_gradient(self, index: int, block: SizedBlock) -> Iterator[PeakCandidate]:
        """Yield the peak of the LM head's backward from its first parameter gradient on."""
        events = block.program.backward
        holdings = self._saved(index, self.stage.stop, "backward") + self._behind(index, self.stage.stop)
        beside = (*self.around.backward_head, *self.around.loss_and_head)
        engine = (*((item, 1) for item in beside), *self._gathered(self.stage.stop))
        since = min(block.program.gradients, default=len(events))
        for position in self.peak_positions(block, "backward", since):
            alive = block.program.alive("backward", position)
            early = is_before_product(block, position)
            yield PeakCandidate([*holdings, (index, alive, 1)], engine, place(block, events, position), early)

    def _before(self, block: SizedBlock, layer: int) -> tuple[RowDraft, ...]:
        """Return the additional engine buffers as a layer's backward begins."""
        if block.kind is None:
            return ()
        return self.around.before_first_backward if layer == self.stage.first else self.around.before_backward

    def _around(self, layer: int, *, after: bool) -> tuple[RowDraft, ...]:
        """Return the engine's buffers in (or right after) a layer's backward; a single layer is both first and last."""
        layer_buffers = self.around
        inside = (layer_buffers.backward_layer, layer_buffers.backward_last_layer, layer_buffers.backward_first_layer)
        beyond = (layer_buffers.after_layer, layer_buffers.after_last_layer, layer_buffers.after_first_layer)
        usual, last, first = beyond if after else inside
        if layer == self.stage.stop - 1:
            return tuple(item for item in last if item in first) if layer == self.stage.first else last
        return first if layer == self.stage.first else usual

    def _engine_behind(
        self, block: SizedBlock, layer: int, *, after: bool = False, beside: tuple[RowDraft, ...] = ()
    ) -> tuple[tuple[RowDraft, int], ...]:
        """Return the engine's buffers in a block's backward, and the gradient shards that later layers have left."""
        buffers = beside
        if beside:
            pass
        elif block.part == "head":
            buffers = self.around.after_head if after else (*self.around.loss_and_head, *self.around.in_head_backward)
        elif block.part == "embedding":
            buffers = self.around.after_embedding if after else self.around.backward_embedding
        elif block.kind is not None:
            buffers = self._around(layer, after=after)
        if block.part != "head":
            buffers = (*buffers, *self.around.share_of_head)
        shares: dict[bool, int] = {}
        if self.around.layer_share:
            for other in self.blocks:
                if other.kind is not None:
                    later = count_between(self.spec, other.kind, max(layer + 1, self.stage.first), self.stage.stop)
                    shares[other.kind.experts] = shares.get(other.kind.experts, 0) + later
        shared = tuple((self.around.layer_share[experts], count) for experts, count in shares.items() if count)
        # a layer's gathered parameters are freed before its gradients are reduced
        gathered = self._gathered(layer - 1 if after else layer)
        return (*((item, 1) for item in buffers), *shared, *gathered)
