"""Layers at which backward may peak.

Along identical layers, live memory is linear, so its maximum is at the first or the last of them. Only a plan that
names the layers to recompute can put the maximum in between.
"""

from __future__ import annotations

from collections.abc import Iterable

from memcalc.layout.stages import LayerType, Stage, kinds_of, runs_of
from memcalc.phase_peaks.layer_buffers import PerLayerBuffers
from memcalc.phase_peaks.peak_candidates import SizedBlock
from memcalc.phase_peaks.stage_blocks import StageBlocks
from memcalc.spec.layers import are_mixed


class PeakLayers(StageBlocks):
    """Selection of the layers in which backward is evaluated."""

    def _turning_points(self, block: SizedBlock, stop: int | None = None) -> tuple[int, ...]:
        """Return the layers where a block's backward may peak, only layers before `stop` if given."""
        if block.opens:
            return (self.stage.first - 1,)
        if block.kind is None:
            return (self.stage.stop,)
        if stop is not None:
            alike = kinds_of(self.spec, self.stage._replace(stop=min(stop, self.stage.stop)))
            ends = [
                {layer_type.first, layer_type.last}
                for layer_type in alike
                if layer_type.traits == block.kind.traits and layer_type.detached == block.kind.detached
            ]
            return tuple(sorted(set[int]().union(*ends), reverse=True))
        points = {block.kind.first, block.kind.last}
        if block.kind.detached:
            return (block.kind.first,)
        for last in self.unread_bytes_before.values():  # a mask is freed below this layer
            since = kinds_of(self.spec, self.stage._replace(first=last))
            points.update(
                layer_type.first
                for layer_type in since
                if layer_type.traits == block.kind.traits and not layer_type.detached
            )
        if self.around == PerLayerBuffers() and isinstance(self.spec.training.recompute, str):
            return tuple(sorted(points, reverse=True))
        # An engine may hold less around the last layer than around the others, so the layers before it are added.
        others = self.stage._replace(stop=self.stage.stop - 1)
        alike = [
            layer_type
            for layer_type in kinds_of(self.spec, others)
            if layer_type.traits == block.kind.traits and not layer_type.detached
        ]
        points.update(layer_type.last for layer_type in alike)
        if self.stage.layers > 1:  # the second layer may have more around it than the first
            behind = kinds_of(self.spec, self.stage._replace(first=self.stage.first + 1))
            points.update(
                layer_type.first
                for layer_type in behind
                if layer_type.traits == block.kind.traits and not layer_type.detached
            )
        if alike and (are_mixed(self.spec) or not isinstance(self.spec.training.recompute, str)):
            points.update(self.peak_layers(alike[0], others))
        return tuple(sorted(points, reverse=True))

    def peak_layers(self, layer_type: LayerType, stage: Stage) -> Iterable[int]:
        """Return the layers of a type that may have the peak under a plan that names the recomputed layers."""
        weights = {}
        for index, block in enumerate(self.blocks):
            if block.kind is not None:
                share = self.around.layer_share.get(block.kind.experts)
                left = self._bytes(index, block.left) + (share.block if share is not None else 0)
                weights[block.kind.traits] = (self._bytes(index, block.program.kept), left)
        height = before = 0
        sums: list[int] = []
        layers: list[int] = []
        for run in runs_of(self.spec, stage):
            saved, left = weights[run.traits]
            # one layer further, one more has saved its tensors and one fewer has left its gradients
            height += before - left
            top = height + (run.count - 1) * (saved - left)
            if run.traits == layer_type.traits:
                sums += [height, top]
                layers += [run.first, run.last]
            height, before = top, saved
        return {layers[-1 - index] for index in self.sizer.largest(sums[::-1])}  # of equal ones the last
