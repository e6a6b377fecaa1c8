"""Forward, loss and backward of one stage, moment by moment: the highest moment of each, and what is alive in it.

Blocks follow one another: embedding, layers, head. A block's program (tape.py) gives its own highest moment; around
it stand what the blocks before it have saved and the gradients of the blocks behind it. Along layers that are alike
this sum is linear, so its highest value is at the first or the last of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from memcalc.estimation.allocation import rounded
from memcalc.estimation.blocks.catalogue import Gradients, Part, program
from memcalc.estimation.blocks.structure import structure_of
from memcalc.estimation.items import Item
from memcalc.estimation.program import Moment, Program, alive_after, highest
from memcalc.estimation.stages import Kind, Stage, count_between, kinds_of
from memcalc.ledger.component import Component
from memcalc.spec.recipes import RECIPES
from memcalc.spec.spec import Spec

Counts = dict[tuple[int, int], int]  # (block, storage) -> how many are alive


class Block(NamedTuple):
    """A part of the stage with its sizes: `count` of them are alike (layers)."""

    name: str
    program: Program
    exact: list[int]
    sizes: list[int]  # rounded as the allocator rounds
    kind: Kind | None


class Highest(NamedTuple):
    """The highest moment of a phase: bytes beside the resident ones, what is alive, and where it is."""

    bytes: int
    counts: Counts
    where: str


class Timeline:
    """The moving part of one stage.

    Args:
        spec: the run.
        stage: the pipeline stage.
        values: symbols and their values.
        gradients: what happens to each parameter's gradient on arrival.
        shards_gradients: whether a layer leaves only its share of the gradients behind (ZeRO 2, 3); the share is then
            resident, and this timeline counts none of it.
    """

    def __init__(
        self, spec: Spec, stage: Stage, values: dict[str, int], gradients: Gradients, *, shards_gradients: bool
    ) -> None:
        structure = structure_of(spec)
        self.spec = spec
        self.stage = stage
        self.shards_gradients = shards_gradients
        self.blocks: list[Block] = []
        sizes_of: dict[int, tuple[list[int], list[int]]] = {}

        def add(name: str, part: Part, kind: Kind | None) -> None:
            compiled = program(structure, part, kind is not None and kind.recomputed, gradients)
            if id(compiled) not in sizes_of:
                exact = compiled.sizes(values)
                sizes_of[id(compiled)] = (exact, [rounded(size) for size in exact])
            self.blocks.append(Block(name, compiled, *sizes_of[id(compiled)], kind))

        if stage.has_embedding:
            add("embedding", "embedding", None)
        kinds = kinds_of(spec, stage)
        for kind in kinds:
            add(layer_name(spec, kind, len(kinds)), "expert layer" if kind.experts else "dense layer", kind)
        if stage.has_head:
            add("head", "head", None)

    # -- the three phases --------------------------------------------------------------------------------------------

    def forward(self) -> Highest:
        """The highest moment of forward, in the last micro-batch that is in flight."""
        return self._best(self._forward_moments())

    def loss(self) -> Highest:
        """The highest moment of the loss; on a stage without a head, the end of forward."""
        counts = self._saved(len(self.blocks), self.stage.stop, "loss")
        if not self.stage.has_head:
            return self._best(iter([(counts, "end of forward")]))
        head = len(self.blocks) - 1
        block = self.blocks[head]
        moment = highest(block.program.loss, block.sizes)
        start = alive_after(block.program.forward)
        alive = alive_after(block.program.loss[: moment.position], start)
        counts = self._saved(head, self.stage.stop, "loss")
        _add(counts, head, alive, 1)
        return self._best(iter([(counts, "loss")]))

    def backward(self) -> Highest:
        """The highest moment of backward."""
        return self._best(self._backward_moments())

    # -- moments -----------------------------------------------------------------------------------------------------

    def _forward_moments(self) -> Iterator[tuple[Counts, str]]:
        for index, block in enumerate(self.blocks):
            layer = self.stage.first if block.kind is None else block.kind.last
            if block.name == "head":
                layer = self.stage.stop
            moment = highest(block.program.forward, block.sizes)
            counts = self._saved(index, layer, "forward")
            _add(counts, index, alive_after(block.program.forward[: moment.position]), 1)
            yield counts, _place(block, block.program.forward, moment)

    def _backward_moments(self) -> Iterator[tuple[Counts, str]]:
        for index, block in enumerate(self.blocks):
            moment = highest(block.program.backward, block.sizes)
            alive = alive_after(block.program.backward[: moment.position], block.program.kept)
            for layer in self._turning_points(block):
                counts = self._saved(index, layer, "backward")
                self._behind(counts, index, layer)
                _add(counts, index, alive, 1)
                yield counts, _place(block, block.program.backward, moment)

    def _turning_points(self, block: Block) -> tuple[int, ...]:
        if block.name == "embedding":
            return (self.stage.first - 1,)
        if block.kind is None:
            return (self.stage.stop,)
        return (block.kind.last,) if block.kind.last == block.kind.first else (block.kind.last, block.kind.first)

    def _saved(self, until: int, layer: int, phase: str) -> Counts:
        """What the blocks before block `until` (layers: before `layer`) hold in a phase, plus other micro-batches."""
        counts: Counts = {}
        others = self.stage.in_flight - 1
        for index, block in enumerate(self.blocks):
            compiled = block.program
            saved = {"forward": compiled.after_forward, "loss": compiled.saved, "backward": compiled.kept}[phase]
            if block.kind is not None:
                before = count_between(self.spec, block.kind, self.stage.first, min(layer, self.stage.stop))
                total = before + others * block.kind.count
            else:
                before = 1 if block.name == "embedding" and until > index else 0
                total = before + others
            _add(counts, index, saved, total)
        return counts

    def _behind(self, counts: Counts, index: int, layer: int) -> None:
        """The gradients that the blocks behind (later layers, the head) have made, and what the step holds of them."""
        for later, block in enumerate(self.blocks):
            left = block.program.left
            if self.shards_gradients:
                left = tuple(i for i in left if block.program.storages[i].component is not Component.GRADIENTS)
            if block.kind is not None:
                after = count_between(self.spec, block.kind, max(layer + 1, self.stage.first), self.stage.stop)
                _add(counts, later, left, after)
            elif block.name == "head" and index != later:
                _add(counts, later, left, 1)

    def _best(self, moments: Iterator[tuple[Counts, str]]) -> Highest:
        best = Highest(-1, {}, "")
        for counts, where in moments:
            total = sum(self.blocks[block].sizes[storage] * count for (block, storage), count in counts.items())
            if total > best.bytes:
                best = Highest(total, counts, where)
        return best

    # -- rows --------------------------------------------------------------------------------------------------------

    def items(self, counts: Counts, mask: int, values: dict[str, int]) -> Iterator[Item]:
        """What is alive, as items of the phases in `mask`."""
        for (index, number), count in counts.items():
            block = self.blocks[index]
            storage = block.program.storages[number]
            each = block.exact[number]
            if not count or not each:
                continue
            shape = (each,) if storage.rule is not None else tuple(values[axis] for axis in storage.shape)
            yield Item(
                storage.component or Component.TEMPORARIES,
                block.name,
                storage.name,
                shape,
                storage.dtype,
                count,
                each,
                block.sizes[number],
                mask,
                block.program.formulas[number],
                storage.citation,
            )


def gradients_on_arrival(spec: Spec, *, exist: bool, sharded: bool) -> Gradients:
    """What becomes of a gradient: kept, or added to one that exists; with a second copy in fp32, or without.

    Sharded gradients are whole until their layer's backward has passed; copies are made of the share.
    """
    if sharded:
        return Gradients(kept=True, main_dtype=None)
    recipe = RECIPES[spec.training.recipe]
    if exist or recipe.gradients is None:
        return Gradients(kept=False, main_dtype=None)
    main = recipe.main_gradients if recipe.main_gradients_live == "backward" else None
    return Gradients(kept=True, main_dtype=main)


def layer_name(spec: Spec, kind: Kind, kinds: int) -> str:
    """ "layers.*", or more exactly where layers differ."""
    if kinds == 1:
        return "layers.*"
    words = []
    if spec.model.moe is not None and spec.model.moe.first_dense_layers:
        words.append("moe" if kind.experts else "dense")
    if spec.training.recompute not in ("none", "selective", "full"):
        words.append("recomputed" if kind.recomputed else "kept")
    return f"layers.{'.'.join(words)}.*"


def _add(counts: Counts, block: int, storages: tuple[int, ...], count: int) -> None:
    if count:
        for storage in storages:
            key = (block, storage)
            counts[key] = counts.get(key, 0) + count


def _place(block: Block, events: tuple[object, ...], moment: Moment) -> str:
    if not moment.position:
        return block.name
    label = getattr(events[moment.position - 1], "label", "")
    return f"{block.name}: {label}"
