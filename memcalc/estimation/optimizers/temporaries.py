"""Temporaries of the optimizer step: update, gradient clipping before it, weight averaging after it.

These run sequentially, so only the highest peak of them counts. States created by the first update do not exist yet
when its gradients are clipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from memcalc.estimation.allocation import rounded
from memcalc.estimation.copies import Spread
from memcalc.estimation.items import Item, mask_of
from memcalc.estimation.optimizers.buffers import Alive, Buffer, Moment, bytes_of, items_of
from memcalc.estimation.optimizers.lists import DECAYED, DROPPED_BEFORE, foreach_moments
from memcalc.estimation.optimizers.loops import loop_moments
from memcalc.estimation.optimizers.states import is_hidden_matrix
from memcalc.estimation.optimizers.update import Update
from memcalc.estimation.sharding import Held, Parameters
from memcalc.ledger.component import Component
from memcalc.spec.recipes import DTYPE_BYTES
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
FILES = {"sgd": "sgd", "momentum": "sgd", "adafactor": "_adafactor", "muon": "_muon"}


class Step(NamedTuple):
    """What the step does besides the update, and the sharding of its parameters.

    Args:
        clips: whether gradients are clipped.
        averages_with_casts: whether an fp32 moving average of bf16 or fp16 parameters is kept.
        spread: ranks that states are sharded across.
        card: the GPU's multiprocessors.
    """

    clips: bool
    averages_with_casts: bool
    spread: Spread
    card: Multiprocessors


class Highest(NamedTuple):
    """Peaks of the first and later steps: their items, and the parts with existing states at the first one."""

    items: tuple[Item, ...]
    made: frozenset[str]


def step_temporaries(parameters: Parameters, update: Update, step: Step, states: dict[str, int]) -> Highest:
    """Return the tensors live at the peak of each step; `states`: bytes that the first step creates, by part."""
    sizes: dict[Alive, int] = {}

    def weight(moment: Moment) -> int:
        for alive in moment.alive:
            if alive not in sizes:
                sizes[alive] = bytes_of(alive, update, step.spread, step.card)
        return sum([sizes[alive] for alive in moment.alive])

    def first_weight(moment: Moment) -> int:
        return weight(moment) + sum([states.get(part, 0) for part in moment.made])

    moments = [Moment([]), *_update_moments(parameters, update), *_placing(parameters, update)]
    if step.averages_with_casts:
        moments.append(_averaging(parameters))
    first, later = max(moments, key=first_weight), max(moments, key=weight)
    clipping = clipping_items(parameters, update, step) if step.clips else []
    clipped = sum(item.block * item.count for item in clipping)
    steps = (
        (mask_of("optimizer_step_1"), first, clipped > first_weight(first)),
        (mask_of("optimizer_step_2"), later, clipped > weight(later)),
    )
    items: list[Item] = []
    for mask, moment, clips in steps:
        if clips:
            items += (item._replace(mask=mask) for item in clipping)
        else:
            citation = citation_of(update)
            items += items_of(moment.alive, update, step.spread, step.card, mask, citation)
    return Highest(tuple(items), frozenset() if steps[0][2] else first.made)


def _placing(parameters: Parameters, update: Update) -> Iterator[Moment]:
    """Yield the points where operators copy a rank's rows out of an unsharded embedding gradient.

    torch 2.13 torch/distributed/tensor/_dispatch.py, redistribute_local_args. Operators for second moments (sums of
    squares) read the gradient twice.
    """
    whole = [held for held in parameters if held.gradient]
    if not whole:
        return
    copies = 2 if second_moments(update.optimizer) and update.implementation != "fused" else 1
    yield Moment([Alive(held, Buffer(f"gradient's own rows {n + 1}")) for held in whole for n in range(copies)])
    placed = [Alive(held, Buffer("gradient's own rows")) for held in whole]
    if update.decays and update.implementation == "foreach" and update.optimizer in DROPPED_BEFORE:
        yield Moment([*(Alive(held, Buffer(DECAYED)) for held in parameters), *placed])
    for moment in _update_moments(parameters, update):
        # A tensor that is added to the gradient, or the sum, is live while the gradient is read.
        made = [alive for alive in moment.alive if update.optimizer == "lion" or alive.buffer.name == DECAYED]
        names = {(alive.held.module, alive.held.tensor) for alive in made}
        beside = [alive for alive in placed if (alive.held.module, alive.held.tensor) in names]
        if beside:
            yield moment._replace(alive=[*made, *beside])


def second_moments(optimizer: str) -> bool:
    """Return whether an optimizer keeps means or sums of squared gradients (addcmul)."""
    return optimizer in ("adam", "adamw", "nadam", "radam", "rmsprop", "adagrad", "adadelta")


# A parameter of any size: the updates of `spec.optimizers.ALONE` have temporaries of the parameter's size.
_ANY = Held("any", "weight", (("m", 2), ("n", 2)), 1, "head")


def update_of_one(update: Update) -> tuple[str, ...]:
    """Return the dtypes of the temporaries, each of the parameter's size, at the peak of updating one parameter."""
    moments = _update_moments(Parameters((_ANY,)), update)
    buffers = [[each.buffer for each in moment.alive] for moment in moments]
    assert all(buffer.shape == "whole" for moment in buffers for buffer in moment), update.optimizer
    dtypes = [tuple(update.dtype if each.dtype == "update" else each.dtype for each in moment) for moment in buffers]
    return max(dtypes, key=lambda each: sum(DTYPE_BYTES[dtype] for dtype in each), default=())


def part_of(held: Held, update: Update) -> str:
    """Return the part of the model with which a parameter's states are created; Muon's own come first."""
    if update.optimizer == "muon":
        return "layer" if is_hidden_matrix(held) else "head"
    return held.where


def _update_moments(parameters: Parameters, update: Update) -> Iterator[Moment]:
    if update.optimizer == "muon":
        rest = Parameters(held for held in parameters if not is_hidden_matrix(held))
        matrices = Parameters(held for held in parameters if is_hidden_matrix(held))
        yield from (moment._replace(made=frozenset({"layer"})) for moment in loop_moments(matrices, update))
        yield from _update_moments(rest, update._replace(optimizer="adamw"))
    elif update.implementation == "foreach":
        yield from foreach_moments(parameters, update)
    elif update.implementation == "for-loop":
        yield from loop_moments(parameters, update)


def citation_of(update: Update) -> str:
    """Return the source of the temporaries."""
    library = LIBRARIES.get(update.optimizer)
    if library is not None:
        return f"{library}: tensors live at the peak"
    name = FILES.get(update.optimizer, update.optimizer)
    return f"torch/optim/{name}.py 2.13, {update.implementation}: tensors live at the peak"


def clipping_items(parameters: Parameters, update: Update, step: Step) -> list[Item]:
    """Return the partial norms of all gradients, one fp32 number per chunk, and the norm of each gradient."""
    tensors = sum(held.count for held in parameters)
    largest = max(prod(step.spread.shape(held)) for held in parameters)
    chunks = -(-largest // CHUNK)

    def norms(name: str, shape: tuple[int, ...], dtype: str, count: int, formula: str) -> Item:
        each = DTYPE_BYTES[dtype] * prod(shape)
        kind, module = Component.TEMPORARIES, "norms of gradients"
        return Item(kind, module, name, shape, dtype, count, each, rounded(each), 0, formula, CLIPPING)

    return [
        norms("partial", (tensors, chunks), "fp32", 1, "4·n·chunks"),
        norms("of each", (1,), update.dtype, tensors, str(DTYPE_BYTES[update.dtype])),
    ]


def _averaging(parameters: Parameters) -> Moment:
    """Return the peak of averaging: each parameter is cast to fp32 in turn (memcalc/step/averages.py)."""
    largest = max(parameters, key=lambda held: held.elements)._replace(count=1)
    return Moment([Alive(largest, Buffer("in fp32, for its average", dtype="fp32"))])
