"""What moments of a step are made of: the blocks of a stage, and what each holds while others are at work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memcalc.estimation.items import Item
from memcalc.estimation.program import Event, Program
from memcalc.estimation.sized import Sized
from memcalc.estimation.stages import Kind, Stage
from memcalc.spec.layers import differ_in_masks, differ_in_rotation
from memcalc.spec.spec import Spec

Holding = tuple[int, tuple[int, ...], int]  # (block, storages, how many of each are alive)


class Candidate(NamedTuple):
    """A moment that may be the highest: what blocks hold, what the engine holds around them, and where it is."""

    holdings: list[Holding]
    engine: tuple[tuple[Item, int], ...]
    where: str


class Block(NamedTuple):
    """A part of the stage with its sizes; `kind` says which layers are alike, if it is one."""

    name: str
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
        return self.name in ("embedding", "shared tables")


class Highest(NamedTuple):
    """The highest moment of a phase: bytes beside the resident ones, what is alive, and where it is."""

    bytes: int
    holdings: list[Holding]
    engine: tuple[tuple[Item, int], ...]
    where: str


def others_of(
    stage: Stage, name: str, program: Program, kind: Kind | None, tables: Program
) -> tuple[tuple[tuple[int, ...], int], ...]:
    """What the other micro-batches in flight hold of a block, and how many of them do.

    They have left forward and its autocast region, and wait for their backward. Of a stage with several chunks
    fewer hold its ends of the model than its layers; the tables that layers share are made for every chunk.
    """
    layers = stage.in_flight - 1
    if name == "head":
        found = [(program.kept, stage.heads - 1), (program.awaited, stage.waiting)]
    elif name == "embedding":
        names = {label[1] for label in tables.labels}
        shared = tuple(storage for storage in program.kept if program.labels[storage][1] in names)
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
    return f"{block.name}: {events[position - 1].label}" if position else block.name
