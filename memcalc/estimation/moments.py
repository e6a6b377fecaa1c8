"""What moments of a step are made of: the blocks of a stage, and what each holds while others are at work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memcalc.estimation.blocks.catalogue import Part
from memcalc.estimation.items import Item
from memcalc.estimation.program import START, Event, Program, When
from memcalc.estimation.sized import Sized
from memcalc.estimation.stages import Kind, Stage
from memcalc.spec.layers import differ_in_masks, differ_in_rotation
from memcalc.spec.spec import Spec

Holding = tuple[int, tuple[int, ...], int]  # (block, storages, how many of each are alive)


class Candidate(NamedTuple):
    """A moment that may be the highest.

    Args:
        holdings: what blocks hold.
        engine: what the engine holds around them.
        where: the moment as it is shown.
        before_product: whether backward has run no matrix product yet.
    """

    holdings: list[Holding]
    engine: tuple[tuple[Item, int], ...]
    where: str
    before_product: bool = False


class Block(NamedTuple):
    """A part of the stage with its sizes; `kind` says which layers are alike, if it is one."""

    name: str
    part: Part
    program: Program
    sized: Sized
    kind: Kind | None
    left: tuple[int, ...]  # what its backward leaves behind, gradients that are sharded left out
    others: tuple[tuple[tuple[int, ...], int], ...]  # what other micro-batches in flight hold of it, and how many do

    @property
    def sizes(self) -> list[int]:
        """Bytes of each storage, rounded as the allocator rounds."""
        return self.sized.sizes

    @property
    def opens(self) -> bool:
        """Whether it stands before all layers."""
        return self.part in ("embedding", "tables")


class Highest(NamedTuple):
    """The peak of a phase: its bytes beside the resident ones, and the moment."""

    bytes: int
    moment: Candidate


def others_of(stage: Stage, part: Part, program: Program, kind: Kind | None) -> tuple[tuple[tuple[int, ...], int], ...]:
    """What the other micro-batches in flight hold of a block, and how many of them do.

    They have left forward and its autocast region, and wait for their backward. Of a stage with several chunks
    fewer hold its ends of the model than its layers; the tables that layers share are made for every chunk.
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
    """ "layers.*", or more exactly where layers differ."""
    if kind.detached:
        return f"layers.{kind.first}.*"
    if kinds == 1:
        return "layers.*"
    words = []
    if spec.model.moe is not None and (spec.model.moe.first_dense_layers or spec.model.moe.mixed):
        words.append("moe" if kind.experts else "dense")
    if differ_in_masks(spec):
        words.append("window" if kind.masked else "full")
    elif differ_in_rotation(spec):
        words.append("unturned" if kind.unturned else "turned")
    if spec.training.recompute not in ("none", "selective", "full"):
        words.append("recomputed" if kind.recomputed else "kept")
    return f"layers.{'.'.join(words)}.*"


def held(program: Program, phase: str) -> tuple[int, ...]:
    """What a block that has run forward holds in a phase."""
    if phase == "backward":
        return program.kept
    return program.after_forward if phase == "forward" else program.saved


def place(block: Block, events: Sequence[Event], position: int) -> str:
    """Where a moment is: the block, and the operator."""
    operator = events[position - 1].operator if position else START
    return block.name if operator.when is When.START else f"{block.name}: {operator.label}"


def is_before_product(block: Block, position: int) -> bool:
    """Whether so many events of a block's backward come before the first matrix product of all: in the head alone."""
    return block.part == "head" and position < block.program.first_product
