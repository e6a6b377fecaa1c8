"""Peak of one forward pass through a pipeline stage, and the tensors live at it.

As layers run, the caches of earlier layers have been written, those of later layers have not. Also live are the
embedding's outputs for all layers, and the tensors of the current layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from memcalc.architectures.catalogue import GradientPolicy, Part, has_own_tape, program
from memcalc.architectures.structure import BlockStructure, block_structure
from memcalc.generation.forwards import Forward, LayerCache, attention_kernel, forwards_of, layer_cache
from memcalc.layout.stages import Stage
from memcalc.layout.symbols import symbol_values
from memcalc.ledger.component import Component
from memcalc.ledger.row_drafts import RowDraft
from memcalc.programs.program import Activity, Program
from memcalc.programs.sized_program import SizedProgram, sizer_of
from memcalc.spec.hardware.gpus import GpuSpec
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.spec.spec import Spec

NOTHING_TRAINS = GradientPolicy(kept=True, main_dtype=None)


@dataclass(frozen=True)
class GenerationBlock:
    """A part of the stage, compiled, with sizes."""

    name: str
    program: Program
    sized: SizedProgram
    written: tuple[int, ...] = ()  # storages of its cache after its forward
    found: tuple[int, ...] = ()  # storages of its cache before its forward

    @property
    def top(self) -> tuple[int, tuple[int, ...]]:
        """The peak of its forward: bytes, and the live storages."""
        storages = self.program.alive("forward", self.sized.highest("forward"))
        return self.sized.bytes_of(storages), storages


class LayerKind(NamedTuple):
    """What the layers of a generating model differ in."""

    experts: bool
    windowed: bool  # whether it has a sliding window
    rotates: bool  # whether it applies RoPE; plain modules do in every layer


class LiveStorages(NamedTuple):
    """Live storages of a block, with the number of copies."""

    block: GenerationBlock
    storages: tuple[int, ...]
    count: int  # type: ignore[assignment] # hides tuple.count, which nothing here needs


class GenerationPeak(NamedTuple):
    """The peak of a forward: transient bytes, and what is live."""

    bytes: int
    live: tuple[LiveStorages, ...]


def forward_peaks(spec: Spec, stage: Stage, gpu: GpuSpec | None) -> dict[str, GenerationPeak]:
    """Return the peak of each phase that runs the model."""
    assert spec.inference is not None
    found: dict[str, GenerationPeak] = {}
    for forward in forwards_of(spec.inference):
        moment = highest(spec, stage, gpu, forward)
        if forward.phase not in found or moment.bytes > found[forward.phase].bytes:
            found[forward.phase] = moment
    return found


def highest(spec: Spec, stage: Stage, gpu: GpuSpec | None, forward: Forward) -> GenerationPeak:
    """Return the peak of one forward on a stage."""
    parts = ForwardBlocks(spec, gpu, forward)
    kinds = [parts.kind(layer) for layer in range(stage.first, stage.stop)]
    left = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    done = dict.fromkeys(left, 0)
    layers = {kind: parts.layer(kind, several=len(left) > 1) for kind in left}
    opening = parts.block("embedding", "embedding") if stage.has_embedding else parts.block("shared tables", "tables")
    best = GenerationPeak(0, ())
    if stage.has_embedding:
        best = _better(best, _around(layers, done, left), opening, opening.top[1])
    standing = LiveStorages(opening, opening.program.after_forward, 1)
    named = LiveStorages(opening, parts.named(opening.program), 1)
    first, before = stage.has_embedding, None
    for kind in kinds:
        left[kind] -= 1
        if not (left[kind] and done[kind]):  # of identical layers the first or the last has the peak
            beside = (standing,) if first else (standing, named)
            if before is not None:  # what the layer before returned besides its output
                beside = (*beside, LiveStorages(layers[before], layers[before].program.handed, 1))
            best = _better(best, (*beside, *_around(layers, done, left)), layers[kind], layers[kind].top[1])
        done[kind] += 1
        first, before = False, kind
    if stage.has_head:
        head = parts.block("head", "head")
        best = _better(best, (standing, named, *_around(layers, done, left)), head, head.top[1])
    return best


def _better(
    best: GenerationPeak, live_around: tuple[LiveStorages, ...], block: GenerationBlock, storages: tuple[int, ...]
) -> GenerationPeak:
    live = (*live_around, LiveStorages(block, storages, 1))
    live = tuple(each for each in live if each.count and each.storages)
    total = sum(each.block.sized.bytes_of(each.storages) * each.count for each in live)
    return GenerationPeak(total, live) if total > best.bytes else best


def _around(
    layers: dict[LayerKind, GenerationBlock],
    done: dict[LayerKind, int],
    left: dict[LayerKind, int],
) -> tuple[LiveStorages, ...]:
    """Return the caches of earlier and later layers, and the earlier ones' casts that autocast caches."""
    before = (LiveStorages(block, block.written + block.program.region, done[kind]) for kind, block in layers.items())
    behind = (LiveStorages(block, block.found, left[kind]) for kind, block in layers.items())
    return (*before, *behind)


class ForwardBlocks:
    """The blocks of one forward.

    Args:
        spec: the run.
        gpu: the GPU, for kernel workspaces that depend on it.
        forward: which tokens it processes.
    """

    def __init__(self, spec: Spec, gpu: GpuSpec | None, forward: Forward) -> None:
        self.spec = spec.with_training(sequence_length=forward.tokens)
        self.forward = forward
        self.structure = block_structure(self.spec)
        self.values = symbol_values(self.spec, gpu)

    def named(self, opening: Program) -> tuple[int, ...]:
        """Return the embedding's output, which transformers' `inputs_embeds` references until the model returns."""
        if self.structure.implementation != "huggingface":
            return ()
        handed = [event.storage for event in opening.forward if event.sign < 0 and event.operator.when is Activity.END]
        return tuple(i for i in handed if i in opening.names or not has_own_tape(self.cached))

    @property
    def cached(self) -> BlockStructure:
        """The structure with the cache of layers without a sliding window."""
        return self.structure._replace(cache=layer_cache(self.spec, self.forward, windowed=False).usage)

    def kind(self, layer: int) -> LayerKind:
        """Return the type of a layer, counted from 0."""
        model = self.spec.model
        rotates = self.structure.implementation != "huggingface" or model.rotates(layer)
        return LayerKind(model.has_experts(layer), model.has_window(layer), rotates)

    def block(self, name: str, part: Part) -> GenerationBlock:
        """Return a block that is not a layer; it creates the mask that layers with a sliding window need."""
        model = self.spec.model
        fused = self.spec.training.attention != "eager"
        windowed = any(model.has_window(layer) and fused for layer in range(model.num_layers))
        return self._block(name, part, layer_cache(self.spec, self.forward, windowed=windowed))

    def _block(self, name: str, part: Part, cache: LayerCache, *, rotates: bool = True) -> GenerationBlock:
        kernel = attention_kernel(self.spec, masked=cache.usage.masked)
        attention = self.structure.attention
        attention = attention._replace(kernel=kernel, pads_heads=attention.pads_heads and kernel == "flash")
        layer = self.structure.layer._replace(without_rope=not rotates)
        structure = self.structure._replace(cache=cache.usage, attention=attention, layer=layer)
        compiled = program(structure, part, False, NOTHING_TRAINS)
        sized = sizer_of(self.values | cache.values).sized(compiled)
        caches = [i for i, each in enumerate(compiled.storages) if each.component is Component.KV_CACHE]
        written = tuple(i for i in caches if i in compiled.kept)
        started = {
            event.storage for event in compiled.forward if event.sign > 0 and event.operator.when is Activity.START
        }
        return GenerationBlock(name, compiled, sized, written, tuple(i for i in caches if i in started))

    def layer(self, kind: LayerKind, *, several: bool) -> GenerationBlock:
        """Return a layer of one type."""
        words = []
        if several:
            moe = self.spec.model.moe
            words += [] if moe is None else ["moe" if kind.experts else "dense"]
            words += [] if not self.spec.model.sliding_window else ["window" if kind.windowed else "full"]
            words += [] if kind.rotates else ["unturned"]
        cache = layer_cache(self.spec, self.forward, windowed=kind.windowed)
        name = f"layers.{'.'.join([*words, '*'])}"
        part: Part = "expert layer" if kind.experts else "dense layer"
        return self._block(name, part, cache, rotates=kind.rotates)


def peak_rows(moment: GenerationPeak, mask: int) -> Iterator[RowDraft]:
    """Yield what is live at a peak, as items."""
    for block, storages, count in moment.live:
        sizes, exact, shapes = block.sized.sizes, block.sized.exact, block.sized.shapes
        for number in storages:
            each = exact[number]
            if not each:
                continue
            component, name, dtype, formula, citation = block.program.labels[number]
            if component is Component.ACTIVATIONS:  # no backward follows: these are live only within the forward
                component = Component.TEMPORARIES
            shape = shapes[number] or (each // DTYPE_BYTES[dtype],)
            yield RowDraft(
                component, block.name, name, shape, dtype, count, each, sizes[number], mask, formula, citation
            )
