"""Blocks of one stage, and the tensors live around one of them: saved by earlier blocks, left by later ones.

Blocks follow one another: embedding, layers, LM head. Each has a program (tape.py); identical layers are one block.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from memcalc.architectures.catalogue import GradientPolicy, Part, program
from memcalc.architectures.structure import BlockStructure, block_structure
from memcalc.layout.stages import LayerType, Stage, count_between, first_recomputed_layer, kinds_of
from memcalc.ledger.row_drafts import RowDraft
from memcalc.phase_peaks.layer_buffers import PerLayerBuffers
from memcalc.phase_peaks.peak_candidates import (
    Holding,
    SizedBlock,
    is_before_product,
    layer_name,
    live_storages,
    others_of,
)
from memcalc.programs.program import Stream
from memcalc.programs.sized_program import ProgramSizer
from memcalc.spec.spec import Spec


def _part_of(layer_type: LayerType) -> Part:
    return "expert layer" if layer_type.experts else "dense layer"


class StageBlocks:
    """The transient tensors of one stage.

    Args:
        spec: the run.
        stage: the pipeline stage.
        sizer: sizes of its blocks.
        gradients: what happens to each produced parameter gradient.
        around: the engine's per-layer buffers; with gradient shards, a layer leaves only its shard.
    """

    def __init__(
        self, spec: Spec, stage: Stage, sizer: ProgramSizer, gradients: GradientPolicy, around: PerLayerBuffers
    ) -> None:
        self.spec = spec
        structure = self.structure()
        self.stage = stage
        self.sizer = sizer
        self.around = around
        # each gradient goes to a bucket once produced
        self.delivers = spec.parallelism.engine == "deepspeed" and not gradients.kept
        self.blocks: list[SizedBlock] = []

        def add(name: str, part: Part, layer_type: LayerType | None) -> None:
            written = structure if layer_type is None else structure.of_layers(layer_type)
            compiled = program(written, part, layer_type is not None and layer_type.recomputed, gradients)
            left = compiled.left
            # FSDP2 reduces the root, LM head and embedding at the end of backward, unless the LM head is a separate
            # unit.
            stays = part == "head" and not around.after_head
            if around.layer_share and not (stays or self.delivers):
                left = compiled.left_without_gradients
            others = others_of(stage, part, compiled, layer_type)
            self.blocks.append(SizedBlock(name, part, compiled, sizer.sized(compiled), layer_type, left, others))

        tables = program(structure, "tables", False, gradients)
        kinds = self.kinds()
        if stage.has_embedding:
            structure = structure._replace(embedding_stays=self._stays(structure, kinds, gradients))
            add("embedding", "embedding", None)
        elif tables.storages:
            add("shared tables", "tables", None)
        alike = sum(not layer_type.detached for layer_type in kinds)
        for kind in kinds:
            add(layer_name(spec, kind, alike), _part_of(kind), kind)
        if stage.has_head:
            add("head", "head", None)

    def structure(self) -> BlockStructure:
        """Return the options of the modules."""
        return block_structure(self.spec)

    def _stays(self, structure: BlockStructure, kinds: list[LayerType], gradients: GradientPolicy) -> bool:
        """Return whether the embedding's output is a leaf with a gradient that the first layer does not save."""
        if structure.adapters is None or not structure.adapters.input_gradient or not kinds:
            return False
        first = min(kinds, key=lambda layer_type: layer_type.first)
        layer = program(structure.of_layers(first), _part_of(first), first.recomputed, gradients)
        return layer.entry not in layer.kept

    def kinds(self) -> list[LayerType]:
        """Return the layer types, in the order of their first layer."""
        return kinds_of(self.spec, self.stage)

    def peak_positions(
        self, block: SizedBlock, stream: Stream, since: int = 0, among: frozenset[int] | None = None
    ) -> Iterable[int]:
        """Return where one of a block's streams may peak: at event `since` or later, or among some positions.

        The LM head's backward has further positions if a peak comes before its first matmul: a lower peak after it may
        be higher with the cuBLAS workspace.
        """
        if among is not None:
            return block.sized.highest_among(stream, among)
        positions = block.sized.highest(stream, since)
        first = block.program.first_matmul
        early = any(is_before_product(block, position) for position in positions)
        if stream == "backward" and early and first <= len(block.program.backward):
            # Before the first matmul, cuBLAS has no workspace in autograd's thread.
            return dict.fromkeys((*positions, *block.sized.highest(stream, first)))
        return positions

    def _saved(self, until: int, layer: int, phase: str) -> list[Holding]:
        """Return what the blocks before `until` (layers: before `layer`) hold in a phase, and other micro-batches."""
        holdings: list[Holding] = []
        for index, block in enumerate(self.blocks):
            if block.kind is not None:
                before = count_between(self.spec, block.kind, self.stage.first, min(layer, self.stage.stop))
            else:
                before = 1 if block.opens and until > index else 0
            if before:
                storages = live_storages(block.program, phase)
                if block.opens and phase == "forward" and not self._first_layer_has_its_input(layer):
                    storages += block.program.named_output
                if block.opens and phase == "backward":
                    storages = self.still_read(storages, layer)
                holdings.append((index, storages, before))
            holdings += [(index, storages, count) for storages, count in block.others]
            if phase == "forward" and block.program.handed and self._has_layer(block, layer - 1):
                holdings.append((index, block.program.handed, 1))
        return holdings

    @cached_property
    def unread_bytes_before(self) -> dict[int, int]:
        """Masks of the stage's first block, each with the first layer that recomputes with it."""
        program = next((block.program for block in self.blocks if block.opens), None)
        read_by = () if program is None else program.read_by
        return {index: first_recomputed_layer(self.spec, self.stage, readers) for index, readers in read_by}

    def still_read(self, storages: tuple[int, ...], layer: int) -> tuple[int, ...]:
        """Return the storages still live in a layer's backward; a mask is freed after its last recomputed layer."""
        gone = {index for index, first in self.unread_bytes_before.items() if layer < first}
        return tuple(index for index in storages if index not in gone) if gone else storages

    def _has_layer(self, block: SizedBlock, layer: int) -> bool:
        """Return whether a layer of this stage belongs to a block."""
        inside = block.kind is not None and layer >= self.stage.first
        return inside and count_between(self.spec, block.kind, layer, layer + 1) > 0  # type: ignore[arg-type]

    def _first_layer_has_its_input(self, layer: int) -> bool:
        """Return whether the first layer references its input while another layer runs."""
        first = next(each for each in self.blocks if each.kind is not None and each.kind.first == self.stage.first)
        return layer == self.stage.first or first.program.entry in first.program.kept

    def _behind(self, index: int, layer: int) -> list[Holding]:
        """Return the gradients of later blocks (later layers, LM head), and what the step holds of those blocks."""
        holdings: list[Holding] = []
        for later, block in enumerate(self.blocks):
            count = int(block.part == "head" and index != later)
            if block.kind is not None:
                count = count_between(self.spec, block.kind, max(layer + 1, self.stage.first), self.stage.stop)
            if count:
                holdings.append((later, block.left, count))
        return holdings

    def _gathered(self, layer: int) -> tuple[tuple[RowDraft, int], ...]:
        """Return the parameters that layers up to this one have kept gathered since forward."""
        found = []
        for experts, item in self.around.layer_gathered.items():
            count = self._layers_of(experts, self.stage.first, min(layer + 1, self.stage.stop))
            if count:
                found.append((item, count))
        return tuple(found)

    def _layers_of(self, experts: bool, lo: int, hi: int) -> int:
        """Return the number of layers in [lo, hi) that are dense, or that have experts."""
        alike = [block.kind for block in self.blocks if block.kind is not None and block.kind.experts is experts]
        return sum(count_between(self.spec, kind, lo, hi) for kind in alike) if hi > lo else 0

    def _bytes(self, block: int, storages: tuple[int, ...]) -> int:
        return self.blocks[block].sized.bytes_of(storages)
