"""Temporaries of the optimizer step: their shapes and dtypes relative to a parameter, and their items."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from memcalc.allocator.pytorch.block_sizes import blocks
from memcalc.layout.local_parameters import LocalParameter
from memcalc.layout.parameters import Axis
from memcalc.ledger.component import Component
from memcalc.ledger.row_drafts import RowDraft
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.states.optimizers.update_rule import UpdateRule
from memcalc.states.parameter_copies import UNSHARDED, ParameterCopy, ShardCounts, copy_row
from memcalc.workspaces import Script, most
from memcalc.workspaces.linear_algebra import decomposition
from memcalc.workspaces.multiprocessors import Multiprocessors
from memcalc.workspaces.reductions import column_sum, norm

# parts of a model; some optimizers create the states of one part after those of another
PARTS = ("embedding", "layer", "head")
ALL = frozenset(PARTS)
BLOCK_4BIT = 128  # elements that share a scale: torchao 0.18 optim/adam.py


class Buffer(NamedTuple):
    """One temporary."""

    name: str  # in rows
    # that of the parameter ("whole"), short side x short side ("gram"), long side x rank ("low"), rank x short side
    # ("projector"), rank x rank ("diagonal"), one number per row ("rows"), per column ("columns"), per element of the
    # short side ("values") or per block of 128 elements ("blocks"), or what a kernel allocates and frees: for a sum
    # over the rows ("stage"), the norm of all elements ("norm") or a singular value decomposition ("svd")
    shape: str = "whole"
    dtype: str = "update"  # a dtype, or "update" for the dtype of the updated tensors


class LiveTensor(NamedTuple):
    """A tensor live at the peak of the step, and its parameter; there is one per such parameter."""

    parameter: LocalParameter
    buffer: Buffer


class StepPoint(NamedTuple):
    """A point in the step."""

    live: list[LiveTensor]  # live tensors
    parts_with_states: frozenset[str] = ALL  # parts of the model that have states by then, in the first step


def bytes_of(live: LiveTensor, update: UpdateRule, shards: ShardCounts, gpu: Multiprocessors) -> int:
    """Return the bytes of all tensors of this type, rounded to allocator blocks."""
    item = item_of(live, update, shards, gpu, 0, "")
    return item.block * item.count


def items_of(
    moment: Iterable[LiveTensor],
    update: UpdateRule,
    shards: ShardCounts,
    gpu: Multiprocessors,
    mask: int,
    citation: str,
) -> list[RowDraft]:
    """Return the items live at a point of the step."""
    return [item_of(live, update, shards, gpu, mask, citation) for live in moment]


def kernel_script(
    parameter: LocalParameter, buffer: Buffer, shards: ShardCounts, gpu: Multiprocessors
) -> Script | None:
    """Return what a kernel allocates and frees for a parameter; None for a tensor."""
    if buffer.shape == "norm":
        return norm(prod(shards.shape(parameter)), gpu)
    if buffer.shape not in ("stage", "svd"):
        return None
    rows, columns = parameter.shape[-2:]
    return (
        column_sum(rows, columns, gpu) if buffer.shape == "stage" else decomposition(rows, columns, DTYPE_BYTES["fp32"])
    )


def item_of(
    live: LiveTensor, update: UpdateRule, shards: ShardCounts, gpu: Multiprocessors, mask: int, citation: str
) -> RowDraft:
    """Return one temporary of a parameter as an item."""
    parameter, buffer = live
    dtype = update.dtype if buffer.dtype == "update" else buffer.dtype
    if buffer.shape == "rows":
        parameter, shards = parameter._replace(axes=parameter.axes[:-1]), UNSHARDED
    elif buffer.shape == "columns":
        parameter, shards = parameter._replace(axes=(*parameter.axes[:-2], parameter.axes[-1])), UNSHARDED
    elif buffer.shape == "blocks":
        parameter, shards = (
            parameter._replace(axes=(("n/128", prod(shards.shape(parameter)) // BLOCK_4BIT),)),
            UNSHARDED,
        )
    elif (script := kernel_script(parameter, buffer, shards, gpu)) is not None:
        axis = (f"{buffer.shape}({parameter.formula})", most(blocks(script)) // DTYPE_BYTES[dtype])
        parameter, shards = parameter._replace(axes=(axis,)), UNSHARDED
    elif buffer.shape != "whole":
        short, long = sorted(parameter.axes, key=lambda axis: axis[1])
        rank = ("r", min(update.rank, short[1]))
        axes: dict[str, tuple[Axis, ...]] = {
            "gram": (short, short),
            "low": (long, rank),
            "projector": (rank, short),
            "diagonal": (rank, rank),
            "values": (short,),
        }
        parameter, shards = parameter._replace(axes=axes[buffer.shape]), UNSHARDED
    return copy_row(
        ParameterCopy(Component.TEMPORARIES, f" {buffer.name}", dtype, 1, mask, citation), parameter, shards
    )
