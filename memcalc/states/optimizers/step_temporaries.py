"""Temporaries of the optimizer step: update, gradient clipping before it, weight averaging after it.

These run sequentially, so only the highest peak of them counts. States created by the first update do not exist yet
when its gradients are clipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from memcalc.allocator.pytorch.block_sizes import rounded
from memcalc.layout.local_parameters import LocalParameter, LocalParameters
from memcalc.ledger.component import Component
from memcalc.ledger.row_drafts import RowDraft, mask_of
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.states.optimizers.for_loop_step import for_loop_points
from memcalc.states.optimizers.foreach_step import DECAYED, DROPPED_BEFORE, foreach_points
from memcalc.states.optimizers.optimizer_states import is_hidden_matrix
from memcalc.states.optimizers.step_buffers import Buffer, LiveTensor, StepPoint, bytes_of, items_of
from memcalc.states.optimizers.update_rule import UpdateRule
from memcalc.states.parameter_copies import ShardCounts
from memcalc.workspaces.multiprocessors import Multiprocessors

CLIPPING = "torch 2.13 nn/utils/clip_grad.py; ATen native/cuda/ForeachReduceOp.cu"
CHUNK = 65536  # elements that one thread block sums into a norm (ATen native/cuda/MultiTensorApply.cuh, kChunkSize)

# libraries with in-place update kernels
LIBRARIES = {
    "lamb": "bitsandbytes 0.50 optim/lamb.py",
    "galore": "galore_torch 1.0 adamw.py",
    "adam-4bit": "torchao 0.18 optim/adam.py, compiled by torch 2.13",
    "lion": "step/lion.py",
    "adafactor-hf": "transformers 5.23 optimization.py",
}
OWN_ROWS = Buffer("gradient's own rows")
FILES = {"sgd": "sgd", "momentum": "sgd", "adafactor": "_adafactor", "muon": "_muon"}


class StepOptions(NamedTuple):
    """Parts of the step in addition to the update, and the sharding of its parameters."""

    clips: bool  # whether gradients are clipped
    averages_with_casts: bool  # whether an fp32 moving average of bf16 or fp16 parameters is kept
    spread: ShardCounts  # ranks that states are sharded across
    card: Multiprocessors  # the GPU's multiprocessors


class StepPeaks(NamedTuple):
    """Peaks of the first and later steps: their items, and the parts with existing states at the first one."""

    items: tuple[RowDraft, ...]
    parts_with_states: frozenset[str]


def step_temporaries(
    parameters: LocalParameters, update: UpdateRule, step: StepOptions, states: dict[str, int]
) -> StepPeaks:
    """Return the tensors live at the peak of each step; `states`: bytes that the first step creates, by part."""
    sizes: dict[LiveTensor, int] = {}

    def weight(point: StepPoint) -> int:
        for live in point.live:
            if live not in sizes:
                sizes[live] = bytes_of(live, update, step.spread, step.card)
        return sum([sizes[live] for live in point.live])

    def first_weight(point: StepPoint) -> int:
        return weight(point) + sum([states.get(part, 0) for part in point.parts_with_states])

    moments = [StepPoint([]), *_update_moments(parameters, update), *_placing(parameters, update, step.spread)]
    if step.averages_with_casts:
        moments.append(_averaging(parameters))
    first, later = max(moments, key=first_weight), max(moments, key=weight)
    clipping = clipping_items(parameters, update, step) if step.clips else []
    clipped = sum(item.block * item.count for item in clipping)
    steps = (
        (mask_of("optimizer_step_1"), first, clipped > first_weight(first)),
        (mask_of("optimizer_step_2"), later, clipped > weight(later)),
    )
    items: list[RowDraft] = []
    for mask, point, clips in steps:
        if clips:
            items += (item._replace(mask=mask) for item in clipping)
        else:
            citation = citation_of(update)
            items += items_of(point.live, update, step.spread, step.card, mask, citation)
    return StepPeaks(tuple(items), frozenset() if steps[0][2] else first.parts_with_states)


def _placing(parameters: LocalParameters, update: UpdateRule, spread: ShardCounts) -> Iterator[StepPoint]:
    """Yield the points where operators copy a rank's rows out of an unsharded embedding gradient."""
    whole = [parameter for parameter in parameters if has_whole_gradient(parameter, spread)]
    if not whole:
        return
    copies = max(gradient_reads(update))
    yield StepPoint([LiveTensor(held, Buffer(f"{OWN_ROWS.name} {n + 1}")) for held in whole for n in range(copies)])
    placed = [LiveTensor(held, OWN_ROWS) for held in whole]
    if update.decays and update.implementation == "foreach" and update.optimizer in DROPPED_BEFORE:
        yield StepPoint([*(LiveTensor(held, Buffer(DECAYED)) for held in parameters), *placed])
    for point in _update_moments(parameters, update):
        # A tensor that is added to the gradient, or the sum, is live while the gradient is read.
        made = [live for live in point.live if update.optimizer == "lion" or live.buffer.name == DECAYED]
        names = {(live.parameter.module, live.parameter.tensor) for live in made}
        beside = [live for live in placed if (live.parameter.module, live.parameter.tensor) in names]
        if beside:
            yield point._replace(live=[*made, *beside])


def has_whole_gradient(parameter: LocalParameter, spread: ShardCounts) -> bool:
    """Return whether the optimizer gets a gradient that is larger than the parameter; an engine's shard is not."""
    return bool(parameter.gradient) and spread.over(parameter) == 1


def gradient_reads(update: UpdateRule) -> tuple[int, ...]:
    """Return how many copies of a rank's rows each operator makes that reads an unsharded gradient, in order.

    Operators for second moments (sums of squares) read the gradient twice.
    Source: torch 2.13 torch/distributed/tensor/_dispatch.py, redistribute_local_args.
    """
    squares = update.optimizer in ("adam", "adamw", "nadam", "radam", "rmsprop", "adagrad", "adadelta")
    return (1, 2) if squares and update.implementation != "fused" else (1,)


# A parameter of any size: the updates of `spec.optimizers.ALONE` have temporaries of the parameter's size.
_ANY = LocalParameter("any", "weight", (("m", 2), ("n", 2)), 1, "head")


def update_of_one(update: UpdateRule) -> tuple[str, ...]:
    """Return the dtypes of the temporaries, each of the parameter's size, at the peak of updating one parameter.

    A kernel's scratch memory for a norm (LAMB), a few KiB, is not counted.
    """
    moments = _update_moments(LocalParameters((_ANY,)), update)
    buffers = [[each.buffer for each in point.live if each.buffer.shape != "norm"] for point in moments]
    assert all(buffer.shape == "whole" for moment in buffers for buffer in moment), update.optimizer
    dtypes = [tuple(update.dtype if each.dtype == "update" else each.dtype for each in moment) for moment in buffers]
    return max(dtypes, key=lambda each: sum(DTYPE_BYTES[dtype] for dtype in each), default=())


def part_of(parameter: LocalParameter, update: UpdateRule) -> str:
    """Return the part of the model with which a parameter's states are created.

    The matrices of layers come first with Muon, last with GaLore.
    """
    if update.optimizer in ("muon", "galore"):
        others = "head" if update.optimizer == "muon" else "embedding"
        return "layer" if is_hidden_matrix(parameter) else others
    return parameter.where


def _update_moments(parameters: LocalParameters, update: UpdateRule) -> Iterator[StepPoint]:
    if update.optimizer == "muon":
        rest = LocalParameters(held for held in parameters if not is_hidden_matrix(held))
        matrices = LocalParameters(held for held in parameters if is_hidden_matrix(held))
        yield from (
            point._replace(parts_with_states=frozenset({"layer"})) for point in for_loop_points(matrices, update)
        )
        yield from _update_moments(rest, update._replace(optimizer="adamw"))
    elif update.implementation == "foreach":
        yield from foreach_points(parameters, update)
    elif update.implementation == "for-loop":
        yield from for_loop_points(parameters, update)


def citation_of(update: UpdateRule) -> str:
    """Return the source of the temporaries."""
    library = LIBRARIES.get(update.optimizer)
    if library is not None:
        return f"{library}: tensors live at the peak"
    name = FILES.get(update.optimizer, update.optimizer)
    return f"torch/optim/{name}.py 2.13, {update.implementation}: tensors live at the peak"


def clipping_items(parameters: LocalParameters, update: UpdateRule, step: StepOptions) -> list[RowDraft]:
    """Return the partial norms of all gradients, one fp32 number per chunk, and the norm of each gradient."""
    tensors = sum(parameter.count for parameter in parameters)
    largest = max(prod(step.spread.shape(held)) for held in parameters)
    chunks = -(-largest // CHUNK)

    def norms(name: str, shape: tuple[int, ...], dtype: str, count: int, formula: str) -> RowDraft:
        each = DTYPE_BYTES[dtype] * prod(shape)
        kind, module = Component.TEMPORARIES, "norms of gradients"
        return RowDraft(kind, module, name, shape, dtype, count, each, rounded(each), 0, formula, CLIPPING)

    return [
        norms("partial", (tensors, chunks), "fp32", 1, "4·n·chunks"),
        norms("of each", (1,), update.dtype, tensors, str(DTYPE_BYTES[update.dtype])),
    ]


def _averaging(parameters: LocalParameters) -> StepPoint:
    """Return the peak of averaging: each parameter is cast to fp32 in turn (memcalc/step/ema.py)."""
    largest = max(parameters, key=lambda parameter: parameter.elements)._replace(count=1)
    return StepPoint([LiveTensor(largest, Buffer("in fp32, for its average", dtype="fp32"))])
