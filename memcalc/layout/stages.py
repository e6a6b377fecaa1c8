"""Layers of each pipeline stage and their types: dense or experts, recomputed or kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from memcalc.layout.adapters import adapters_of
from memcalc.layout.schedules import (
    ORDERED,
    InFlightMicroBatches,
    ModelChunk,
    chunks_in_flight,
    chunks_of,
    in_flight_micro_batches,
    uses_pipelining,
)
from memcalc.layout.spec_cache import cached_by_spec
from memcalc.spec.layers import applies_no_rope, are_mixed, has_mask, windows_among
from memcalc.spec.recompute_plan import leaves
from memcalc.spec.spec import Spec

READERS = {"windows": True, "others": False}  # readers of a mask: layers with a sliding window, or without


class Stage(NamedTuple):
    """One pipeline stage, or one chunk of one: layers `first` up to but not including `stop`.

    Args:
        index: its number in the pipeline, from 0.
        first: first layer; with several chunks, that of the first chunk.
        stop: end of the layers; with several chunks, that of the first chunk.
        has_embedding: whether it holds the embedding.
        has_head: whether it holds final norm and LM head.
        in_flight: maximum number of micro-batches (or chunks) with live activations.
        pieces: its chunks, if there are several.
        embeddings: maximum number of micro-batches with a live embedding, if it has one.
        heads: maximum number of micro-batches with live logits.
        waiting: micro-batches that wait only for the LM head's weight gradient.
        before: the number of layers in earlier chunks of the same stage.
    """

    index: int  # type: ignore[assignment] # hides tuple.index, which no stage needs
    first: int
    stop: int
    has_embedding: bool
    has_head: bool
    in_flight: int
    pieces: tuple[Stage, ...] = ()
    embeddings: int = 1
    heads: int = 1
    waiting: int = 0
    before: int = 0

    @property
    def chunks(self) -> tuple[Stage, ...]:
        """The chunks that forward runs sequentially."""
        return self.pieces or (self,)

    @property
    def layers(self) -> int:
        """The number of layers on the stage."""
        return sum(piece.stop - piece.first for piece in self.chunks)

    @property
    def sends(self) -> int:
        """The number of tensors that it sends for each micro-batch: hidden states ahead, and their gradients back."""
        return sum((not piece.has_head) + (not piece.has_embedding) for piece in self.chunks)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of its layers in the model, in the order of forward."""
        return tuple(number for piece in self.chunks for number in range(piece.first, piece.stop))


class LayerModules(NamedTuple):
    """The features in which the modules of layers differ, regardless of a recomputation plan."""

    experts: bool = False  # whether the MLP is a mixture of experts
    masked: bool = False  # whether the sequence exceeds its sliding window, which a mask then applies
    without_rope: bool = False  # whether no RoPE is applied
    linear: bool = False  # whether it has linear attention
    full_heads: bool = False  # whether it has the heads of `full_attention`
    mixer: str = ""  # the letter of its single module; empty: it has attention and an MLP
    detached: bool = False  # whether the input needs no gradient, since nothing before it trains
    reads_leaf: bool = False  # whether matmuls read the input, a leaf with a gradient; autocast caches casts of leaves

    @property
    def starts_apart(self) -> bool:
        """Whether it is a first layer that differs from the others in its input."""
        return self.detached or self.reads_leaf


def stages_of(spec: Spec) -> tuple[Stage, ...]:
    """Return the stages of a pipeline; what remains of an even split goes to the first stages."""
    parallelism = spec.parallelism
    return _stages_of(
        spec.model.num_layers,
        parallelism.pipeline_parallel,
        parallelism.schedule,
        parallelism.virtual_stages,
        spec.training.gradient_accumulation_steps,
        ends=parallelism.pipeline_split == "layers-and-ends",
    )


@lru_cache(maxsize=256)
def _stages_of(
    layers: int, stages: int, schedule: str, virtual: int, micro_batches: int, *, ends: bool
) -> tuple[Stage, ...]:
    found = []
    for index in range(stages):
        in_flight = chunks_in_flight(schedule, stages, virtual, index, micro_batches)
        in_flight_counts = in_flight_micro_batches(schedule, stages, virtual, index, micro_batches)
        pieces: list[Stage] = []
        for chunk in chunks_of(schedule, stages, virtual, index):
            piece = _piece(layers, index, chunk, in_flight, in_flight_counts, ends=ends)
            pieces.append(piece._replace(before=sum(each.layers for each in pieces)))
        held = any(piece.has_embedding for piece in pieces), any(piece.has_head for piece in pieces)
        whole = Stage(index, pieces[0].first, pieces[0].stop, *held, in_flight, tuple(pieces), *in_flight_counts)
        found.append(pieces[0] if len(pieces) == 1 else whole)
    return tuple(found)


def _piece(
    layers: int, index: int, chunk: ModelChunk, in_flight: int, in_flight_counts: InFlightMicroBatches, *, ends: bool
) -> Stage:
    """Return a chunk of a stage; `ends`: embedding and LM head are split like layers, as the first and the last."""
    share, rest = divmod(layers + 2 * ends, chunk.of)
    begin = chunk.part * share + min(chunk.part, rest)
    end = begin + share + (chunk.part < rest)
    first, stop = (min(max(place - ends, 0), layers) for place in (begin, end))
    held = chunk.part == 0, chunk.part == chunk.of - 1
    return Stage(index, first, stop, *held, in_flight, (), *in_flight_counts)


def is_steady(spec: Spec, stage: Stage) -> bool:
    """Return whether a step has a backward with the most micro-batches in flight, and with all gradients.

    With few micro-batches a pipeline has none: the first backward, which meets no gradients, has the most in flight.
    Nor do PyTorch's schedules of several chunks, which may differ, and which keep all that a step has sent. Schedules
    without a known order are taken as steady.
    """
    parallelism, micro_batches = spec.parallelism, spec.training.gradient_accumulation_steps
    stages = parallelism.pipeline_parallel
    if stages == 1 or micro_batches * parallelism.virtual_stages == 1 or parallelism.schedule not in ORDERED:
        return True
    if parallelism.schedule == "interleaved":
        return not uses_pipelining(spec) and micro_batches > 2 * stages
    return micro_batches > stage.in_flight


def one_in_flight(stage: Stage) -> Stage:
    """Return the stage, or one chunk, with a single micro-batch in flight."""
    return stage._replace(index=0, in_flight=1, embeddings=1, heads=1, waiting=0)


def composition(spec: Spec, stage: Stage) -> tuple[object, ...]:
    """Return a key of what the memory of a stage or chunk depends on, except its micro-batches in flight."""
    first, stop, ends = stage.first, stage.stop, (stage.has_embedding, stage.has_head)
    if spec.training.recompute not in ("none", "selective", "full") or are_mixed(spec):
        return first, stop, *ends  # the pattern of layers depends on the first layer
    return (
        stop - first,
        spec.model.layers_with_experts(first, stop),
        first == 0 < stop and _starts_apart(spec),
        *ends,
    )


def stages_that_matter(spec: Spec) -> list[Stage]:
    """Return one stage of each type, in order: the first of them, which has the most micro-batches in flight.

    Stages are of one type when they hold equally many layers of each type, and agree on holding embedding and LM head.
    In no schedule does a later stage have more in flight than an earlier one.
    """
    return [alike[0] for alike in stages_alike(spec)]


def stages_alike(spec: Spec) -> list[list[Stage]]:
    """Return all stages by type, as `stages_that_matter` has them."""
    found: dict[object, list[Stage]] = {}
    for stage in stages_of(spec):
        found.setdefault(tuple(composition(spec, piece) for piece in stage.chunks), []).append(stage)
    return list(found.values())


def starts_detached(spec: Spec) -> bool:
    """Return whether the first layer's input needs no gradient."""
    adapters = adapters_of(spec)
    return adapters is not None and not adapters.input_gradient


def reads_leaf(spec: Spec) -> bool:
    """Return whether matmuls of the first layer read the embedding's output, and it is a leaf with a gradient."""
    adapters, model = adapters_of(spec), spec.model
    if adapters is None or not adapters.input_gradient or "embed_tokens" in adapters.saved:
        return False
    return model.norms_per_layer == 2 and model.norm_placement == "after" and spec.training.autocasts


def _starts_apart(spec: Spec) -> bool:
    return starts_detached(spec) or reads_leaf(spec)


def layers_are_alike(spec: Spec, stage: Stage) -> bool:
    """Return whether the layers of a stage or chunk differ in nothing, but that the first may start apart."""
    again, numbers = recomputed_layers(spec, stage), range(stage.first, stage.stop)
    modules = zip(map(modules_by_layer(spec), numbers), map(again.__contains__, numbers), strict=True)
    return len({each for each in modules if not each[0].starts_apart}) == 1


@cached_by_spec
def modules_by_layer(spec: Spec) -> Callable[[int], LayerModules]:
    """Return a function that returns what one layer's modules differ in from those of others."""
    model, mixed = spec.model, are_mixed(spec)
    first_apart = _starts_apart(spec)
    known: dict[tuple[int, bool, bool], LayerModules] = {}

    def of(layer: int) -> LayerModules:
        # Unless layer types alternate, layers differ in experts alone, and the first one in what its input needs.
        key = layer if mixed else 0, model.has_experts(layer), first_apart and layer == 0
        if key not in known:
            _, experts, apart = key
            known[key] = LayerModules(
                experts=experts,
                masked=has_mask(spec, layer),
                without_rope=applies_no_rope(spec, layer),
                linear=model.is_linear(layer),
                full_heads=model.has_full_heads(layer),
                mixer=model.mixer(layer),
                detached=apart and starts_detached(spec),
                reads_leaf=apart and reads_leaf(spec),
            )
        return known[key]

    if mixed or first_apart or model.layers_with_experts(0, model.num_layers):
        return of
    alike = of(0)
    return lambda _: alike


def layer_modules(spec: Spec, layer: int) -> LayerModules:
    """Return what one layer's modules differ in from those of others."""
    return modules_by_layer(spec)(layer)


def recomputed_layers(spec: Spec, stage: Stage) -> set[int]:
    """Return the layers of a stage or chunk that are recomputed in backward.

    torchtitan counts the layers of a rank to find every k-th one, not those of the model (0.2.2
    distributed/activation_checkpoint.py, _layer_sac_count).
    """
    training, numbers = spec.training, range(stage.first, stage.stop)
    plan = training.recompute
    if not isinstance(plan, str):
        return {layer for layer in leaves(plan) if layer in numbers}
    if plan in ("none", "selective"):
        return set()
    k = 1 if plan == "full" else int(plan.removeprefix("every-"))
    counted = stage.before if training.framework == "torchtitan" else stage.first
    return {layer for count, layer in enumerate(numbers, counted + 1) if count % k == 0}


def recomputed_windows(spec: Spec) -> tuple[bool, bool]:
    """Return whether a layer with a sliding window is recomputed, and whether a layer without one is."""
    plan = spec.training.recompute
    if not isinstance(plan, str):
        found = {spec.model.has_window(layer) for layer in leaves(plan)}
        return True in found, False in found
    if plan in ("none", "selective"):
        return False, False
    return windows_among(spec.model, int(plan.removeprefix("every-")) if plan != "full" else 1)


def first_recomputed_layer(spec: Spec, stage: Stage, readers: str) -> int:
    """Return the first layer of a stage that reads a mask and is recomputed; `readers`: all, or one of READERS."""
    wanted, model = READERS.get(readers), spec.model
    recomputed = recomputed_layers(spec, stage)
    return min((layer for layer in recomputed if wanted in (None, model.has_window(layer))), default=stage.stop)
