"""Blocks of one stage, or one chunk of it: embedding, layers, LM head.

Each block has a program (programs/tape_compiler.py) and its sizes; equal layers are one block. A layer has up to three:
kept, recomputed, and recomputed with other layers of its checkpoint segment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

from memcalc.architectures.catalogue import GradientPolicy, Part, program
from memcalc.architectures.structure import BlockStructure, block_structure
from memcalc.layout.parameters import MIXERS
from memcalc.layout.stages import LayerModules, Stage, first_recomputed_layer, layer_modules, layers_are_alike
from memcalc.programs.program import Program
from memcalc.programs.sized_program import ProgramSizer, SizedProgram
from memcalc.spec.layers import differ_in_attention, differ_in_masks, differ_in_rotation
from memcalc.spec.recompute_plan import Segment, leaves
from memcalc.spec.spec import Spec
from memcalc.states.state_options import state_options

NO_HEAD = -1  # number of the head's block on a stage without LM head


class SizedBlock(NamedTuple):
    """A block of a stage.

    Args:
        part: the part of the model.
        program: its program.
        sized: the bytes of the program's storages.
        layer: the first layer that uses it; -1 for embedding and LM head.
        again: whether a checkpoint recomputes it.
    """

    part: Part
    program: Program
    sized: SizedProgram
    layer: int = -1
    again: bool = False

    @property
    def sizes(self) -> list[int]:
        """Bytes of each storage, rounded to the allocator's blocks."""
        return self.sized.sizes

    @property
    def opens(self) -> bool:
        """Whether the block precedes all layers."""
        return self.part in ("embedding", "tables")


class BlockVariant(NamedTuple):
    """The variant of a layer's program.

    Args:
        modules: differences of its modules from those of other layers.
        again: whether the layer is recomputed, as the last one of its checkpoint segment.
        inside: whether it is recomputed with other layers of its segment, which follow it unless `again`.
    """

    modules: LayerModules
    again: bool
    inside: bool


class StageBlocks:
    """The blocks of a stage, compiled on first use.

    Args:
        spec: the run.
        stage: the pipeline stage, or one chunk of it.
        sizer: sizes of its blocks.
        gradients: what happens to each produced parameter gradient.
        plan: the recomputation plan of its layers.
        blocks: the list that they are appended to, if several models share the numbers of blocks.
        without_gradients: whether autograd is off, as in an evaluation.
        without_adapters: whether adapters are disabled.
    """

    def __init__(
        self,
        spec: Spec,
        stage: Stage,
        sizer: ProgramSizer,
        gradients: GradientPolicy,
        plan: Segment,
        *,
        blocks: list[SizedBlock] | None = None,
        without_gradients: bool = False,
        without_adapters: bool = False,
    ) -> None:
        self.spec = spec
        self.stage = stage
        self.sizer = sizer
        self.gradients = gradients
        self.plan = plan
        structure = self._structure(without_gradients=without_gradients)
        self.structure = structure.without_adapters() if without_adapters else structure
        self.blocks = [] if blocks is None else blocks
        self.head = NO_HEAD
        self._of_layers: dict[BlockVariant, int] = {}
        self.openings: tuple[int, ...] = ()  # blocks before all layers
        if stage.has_embedding:
            embedding = self.structure.embedding._replace(stays=self._embedding_stays())
            self.openings = (self._add("embedding", self.structure._replace(embedding=embedding)),)
        elif program(self.structure, "tables", False, gradients).storages:
            self.openings = (self._add("tables", self.structure),)
        if stage.has_head:
            self.head = self._add("head", self.structure)

    def _structure(self, *, without_gradients: bool) -> BlockStructure:
        """Return the structure of the blocks.

        A model of transformers that computes its loss has a variable for the LM head's input (hidden_states, 5.23
        models/llama/modeling_llama.py). Autograd saves it if the head trains.
        """
        in_model = state_options(self.spec).model.loss_in_model and not self.spec.training.pairs
        structure = block_structure(self.spec)
        head, saving = structure.head._replace(names_input=in_model), structure.saving
        if without_gradients:
            saving = saving._replace(without_gradients=True, checkpoints_layers=False)
            # The function that scores pairs references their logits until it returns; autograd saves none.
            head = head._replace(drops_logits=head.drops_logits and structure.loss.kind != "selective")
        return structure._replace(head=head, saving=saving)

    def _add(
        self, part: Part, structure: BlockStructure, layer: int = -1, *, again: bool = False, inside: bool = False
    ) -> int:
        compiled = program(structure, part, again, self.gradients, inside)
        self.blocks.append(SizedBlock(part, compiled, self.sizer.sized(compiled), layer, again))
        return len(self.blocks) - 1

    def _embedding_stays(self) -> bool:
        """Return whether the embedding's output is a leaf with a gradient that the first layer does not save."""
        adapters = self.structure.linears.adapters
        if adapters is None or not adapters.input_gradient or not self.plan:
            return False
        number, entry = self.entry
        return entry not in self.blocks[number].program.kept

    def block_of(self, layer: int, *, again: bool = False, inside: bool = False) -> int:
        """Return the number of a layer's block.

        Args:
            layer: its number in the model.
            again: whether it is recomputed, and no layer of its checkpoint segment follows it.
            inside: whether it is recomputed with other layers of its checkpoint segment.
        """
        modules = layer_modules(self.spec, layer)
        variant = BlockVariant(modules, again, inside)
        if variant not in self._of_layers:
            part: Part = "expert layer" if modules.experts else "dense layer"
            structure = self.structure.of_layers(modules)
            self._of_layers[variant] = self._add(part, structure, layer, again=again, inside=inside)
        return self._of_layers[variant]

    @property
    def counts(self) -> Counter[int]:
        """How many there are of each block, by its number; a checkpoint segment counts as its first layer."""
        found = Counter(self.openings)
        found.update(self.block_of(next(leaves(item)), again=not isinstance(item, int)) for item in self.plan)
        found.update([] if self.head == NO_HEAD else [self.head])
        return found

    @property
    def entry(self) -> tuple[int, int]:
        """The block that reads the stage's input, and the number of the input in its program."""
        first = self.block_of(self.stage.first, again=not isinstance(self.plan[0], int)) if self.plan else self.head
        return first, self.blocks[first].program.entry

    @cached_property
    def masks_until(self) -> dict[int, int]:
        """The masks of the stage's first block, each with the first layer that recomputes with it.

        The graph references what a reentrant checkpoint recomputes with until the loss is freed: no layer is the last
        (torch 2.13 torch/utils/checkpoint.py, CheckpointFunction: ctx.run_function).
        """
        if self.structure.saving.reentrant:
            return {}
        read_by = self.blocks[self.openings[0]].program.read_by if self.openings else ()
        return {index: first_recomputed_layer(self.spec, self.stage, readers) for index, readers in read_by}

    def in_flight_ends(self) -> Iterator[tuple[int, tuple[int, ...], str]]:
        """Yield block, storages and a field of `Stage`: live tensors of other micro-batches outside the layers.

        These micro-batches have finished forward and its autocast region, and wait for backward. In a stage with
        several chunks, fewer micro-batches are in flight in the embedding and LM head than in the layers. Tensors that
        layers share exist once per chunk.
        """
        for number in self.openings:
            opening = self.blocks[number].program
            shared = tuple(at for at in opening.kept if opening.storages[at].table is not None)
            if self.blocks[number].part == "tables":
                yield number, opening.kept, "in_flight"
                continue
            yield number, shared, "in_flight"
            yield number, tuple(at for at in opening.kept if at not in shared), "embeddings"
        if self.head != NO_HEAD:
            head = self.blocks[self.head].program
            yield self.head, head.kept, "heads"
            yield self.head, head.awaited, "waiting"


NAMES = {"embedding": "embedding", "tables": "shared tables", "head": "head"}


def module_of(spec: Spec, stage: Stage, block: SizedBlock) -> str:
    """Return a block's module in rows: "layers.*", or a more specific name where layers differ."""
    if block.layer < 0:
        return NAMES[block.part]
    modules = layer_modules(spec, block.layer)
    if modules.starts_apart:
        return f"layers.{block.layer}.*"
    if layers_are_alike(spec, stage):
        return "layers.*"
    words = []
    if modules.mixer:
        words.append(MIXERS[modules.mixer])
    elif spec.model.moe is not None and (spec.model.moe.first_dense_layers or spec.model.moe.mixed):
        words.append("moe" if modules.experts else "dense")
    if differ_in_attention(spec.model):
        of_others = "linear" if spec.model.linear_attention is not None else "window"
        words.append(of_others if modules.linear or not modules.full_heads else "full")
    elif differ_in_masks(spec):
        words.append("window" if modules.masked else "full")
    elif differ_in_rotation(spec):
        words.append("unturned" if modules.without_rope else "turned")
    if spec.training.recompute not in ("none", "selective", "full"):
        words.append("recomputed" if block.again else "kept")
    return f"layers.{'.'.join(words)}.*"
