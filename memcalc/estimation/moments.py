"""Candidates for the peak of a phase: the blocks of a stage, and the tensors each holds meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memcalc.estimation.blocks.catalogue import Part
from memcalc.estimation.items import Item
from memcalc.estimation.program import START, Event, Program, When
from memcalc.estimation.sized import Sized
from memcalc.estimation.stages import Kind, Stage
from memcalc.spec.layers import differ_in_attention, differ_in_masks, differ_in_rotation
from memcalc.spec.spec import Spec

Holding = tuple[int, tuple[int, ...], int]  # (block number, storages, number of live copies of each)


class Candidate(NamedTuple):
    """A point in the step that may be the peak.

    Args:
        holdings: live storages of each block.
        engine: live buffers of the engine.
        where: name of the point, as shown.
        before_product: whether it comes before backward's first matmul.
    """

    holdings: list[Holding]
    engine: tuple[tuple[Item, int], ...]
    where: str
    before_product: bool = False


class Block(NamedTuple):
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
    sized: Sized
    kind: Kind | None
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


class Highest(NamedTuple):
    """The peak of a phase: transient bytes, and the point in the step."""

    bytes: int
    moment: Candidate


def others_of(stage: Stage, part: Part, program: Program, kind: Kind | None) -> tuple[tuple[tuple[int, ...], int], ...]:
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
        found = [(program.kept, layers * (1 if kind is None else kind.count))]
    return tuple((storages, count) for storages, count in found if count)


def layer_name(spec: Spec, kind: Kind, kinds: int) -> str:
    """ "layers.*", or a more specific name where layer types differ."""
    if kind.detached:
        return f"layers.{kind.first}.*"
    if kinds == 1:
        return "layers.*"
    words = []
    if spec.model.moe is not None and (spec.model.moe.first_dense_layers or spec.model.moe.mixed):
        words.append("moe" if kind.experts else "dense")
    if differ_in_attention(spec.model):
        words.append("linear" if kind.linear else "full")
    elif differ_in_masks(spec):
        words.append("window" if kind.masked else "full")
    elif differ_in_rotation(spec):
        words.append("unturned" if kind.unturned else "turned")
    if spec.training.recompute not in ("none", "selective", "full"):
        words.append("recomputed" if kind.recomputed else "kept")
    return f"layers.{'.'.join(words)}.*"


def held(program: Program, phase: str) -> tuple[int, ...]:
    """Return the storages that a block holds in a phase once its forward has run."""
    if phase == "backward":
        return program.kept
    return program.after_forward if phase == "forward" else program.saved


def place(block: Block, events: Sequence[Event], position: int) -> str:
    """Return the name of a point: the block and the operator."""
    operator = events[position - 1].operator if position else START
    return block.name if operator.when is When.START else f"{block.name}: {operator.label}"


def is_before_product(block: Block, position: int) -> bool:
    """Return whether a position in backward comes before the first matmul; only possible in the LM head."""
    return block.part == "head" and position < block.program.first_product
