"""Candidates for the peak of a phase: the blocks of a stage, and the tensors each holds meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memcalc.architectures.catalogue import Part
from memcalc.layout.stages import LayerType, Stage
from memcalc.ledger.row_drafts import RowDraft
from memcalc.programs.program import START, Activity, Program, StorageEvent
from memcalc.programs.sized_program import SizedProgram
from memcalc.spec.layers import differ_in_attention, differ_in_masks, differ_in_rotation
from memcalc.spec.spec import Spec

Holding = tuple[int, tuple[int, ...], int]  # (block number, storages, number of live copies of each)


class PeakCandidate(NamedTuple):
    """A point in the step that may be the peak.

    Args:
        holdings: live storages of each block.
        engine: live buffers of the engine.
        where: name of the point, as shown.
        before_product: whether it comes before backward's first matmul.
    """

    holdings: list[Holding]
    engine: tuple[tuple[RowDraft, int], ...]
    where: str
    before_matmul: bool = False


class SizedBlock(NamedTuple):
    """A block of the stage with its sizes.

    Args:
        name: its name in rows.
        part: the part of the model.
        program: its compiled program.
        sized: the program with the run's sizes.
        kind: its layer type; None for embedding and LM head.
        left: storages that its backward leaves allocated, without sharded gradients.
        others: storages live for other micro-batches in flight, with the number of such micro-batches.
    """

    name: str
    part: Part
    program: Program
    sized: SizedProgram
    kind: LayerType | None
    left: tuple[int, ...]
    others: tuple[tuple[tuple[int, ...], int], ...]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each storage, rounded to the allocator's blocks."""
        return self.sized.sizes

    @property
    def opens(self) -> bool:
        """Whether it comes before all layers."""
        return self.part in ("embedding", "tables")


class TransientPeak(NamedTuple):
    """The peak of a phase: transient bytes, and the point in the step."""

    bytes: int
    moment: PeakCandidate


def others_of(
    stage: Stage, part: Part, program: Program, layer_type: LayerType | None
) -> tuple[tuple[tuple[int, ...], int], ...]:
    """Return the storages of a block that other micro-batches in flight hold, and the number of such micro-batches.

    They have left forward and its autocast region and wait for their backward. In a stage with several chunks, fewer
    micro-batches hold the embedding and LM head than the layers. Tensors that layers share exist once per chunk.
    """
    layers = stage.in_flight - 1
    if part == "head":
        found = [(program.kept, stage.heads - 1), (program.awaited, stage.waiting)]
    elif part == "embedding":
        shared = tuple(storage for storage in program.kept if program.storages[storage].table is not None)
        own = tuple(storage for storage in program.kept if storage not in shared)
        found = [(shared, layers), (own, stage.embeddings - 1)]
    else:
        found = [(program.kept, layers * (1 if layer_type is None else layer_type.count))]
    return tuple((storages, count) for storages, count in found if count)


def layer_name(spec: Spec, layer_type: LayerType, kinds: int) -> str:
    """ "layers.*", or a more specific name where layer types differ."""
    if layer_type.detached:
        return f"layers.{layer_type.first}.*"
    if kinds == 1:
        return "layers.*"
    words = []
    if spec.model.moe is not None and (spec.model.moe.first_dense_layers or spec.model.moe.mixed):
        words.append("moe" if layer_type.experts else "dense")
    if differ_in_attention(spec.model):
        words.append("linear" if layer_type.linear else "full")
    elif differ_in_masks(spec):
        words.append("window" if layer_type.masked else "full")
    elif differ_in_rotation(spec):
        words.append("unturned" if layer_type.without_rope else "turned")
    if spec.training.recompute not in ("none", "selective", "full"):
        words.append("recomputed" if layer_type.recomputed else "kept")
    return f"layers.{'.'.join(words)}.*"


def live_storages(program: Program, phase: str) -> tuple[int, ...]:
    """Return the storages that a block holds in a phase once its forward has run."""
    if phase == "backward":
        return program.kept
    return program.after_forward if phase == "forward" else program.saved


def place(block: SizedBlock, events: Sequence[StorageEvent], position: int) -> str:
    """Return the name of a point: the block and the operator."""
    operator = events[position - 1].operator if position else START
    return block.name if operator.when is Activity.START else f"{block.name}: {operator.label}"


def is_before_product(block: SizedBlock, position: int) -> bool:
    """Return whether a position in backward comes before the first matmul; only possible in the LM head."""
    return block.part == "head" and position < block.program.first_matmul
