"""Copies of the parameters (weights, master weights, gradients ...): dtype, sharding and phases of each."""

from __future__ import annotations

from enum import Enum, auto
from functools import lru_cache
from math import prod
from typing import NamedTuple

from memcalc.allocator.pytorch.block_sizes import rounded
from memcalc.layout.local_parameters import LocalParameter, shard_shape
from memcalc.layout.parameters import Axis, formula_of
from memcalc.ledger.component import Component
from memcalc.ledger.row_drafts import RowDraft
from memcalc.spec.recipes import DTYPE_BYTES


class ShardCounts(NamedTuple):
    """Number of ranks that a copy is sharded across."""

    ranks: int  # ranks for all parameters but routed experts
    expert_ranks: int  # ranks for routed experts
    engine: str  # the engine that shards, which sets the padding
    # Whether routed experts are a unit of FSDP2: where a rank has fewer experts than their unit has ranks, their second
    # axis is sharded (torchtitan 0.2.2 models/llama4/infra/parallelize.py, apply_fsdp).
    expert_units: bool = False

    def over(self, parameter: LocalParameter) -> int:
        """Return the number of ranks that one parameter is sharded across."""
        if parameter.beside:
            return 1
        return self.expert_ranks if parameter.routed else self.ranks

    def axis(self, parameter: LocalParameter) -> int:
        """Return the axis that FSDP2 shards; 0 for scalars, such as the factor of an Adafactor step."""
        splits_rows = self.expert_units and parameter.routed and len(parameter.shape) > 1
        return int(splits_rows and self.expert_ranks > parameter.shape[0])

    def shape(self, parameter: LocalParameter) -> tuple[int, ...]:
        """Return the shape of one rank's shard of a parameter."""
        return _share(parameter.axes, self.over(parameter), self.engine, self.axis(parameter))[0]

    def copy_shape(self, copy: ParameterCopy, parameter: LocalParameter) -> tuple[int, ...]:
        """Return the shape of one rank's shard of a copy of a parameter."""
        ranks = self.over(parameter)
        return _share(copy.axes(parameter, ranks), ranks, self.engine, self.axis(parameter))[0]


UNSHARDED = ShardCounts(1, 1, "")


class Role(Enum):
    """Role of a copy of the parameters."""

    WEIGHTS = auto()
    MASTER_WEIGHTS = auto()
    GRADIENTS = auto()  # in autograd's dtype
    SUMMED_GRADIENTS = auto()  # accumulated over micro-batches
    MASTER_GRADIENTS = auto()  # read by the optimizer along with master weights
    AVERAGE = auto()
    REFERENCE = auto()  # of a frozen copy of the model
    OTHER = auto()


class ParameterCopy(NamedTuple):
    """One copy of every parameter of a rank."""

    component: Component  # the component that its bytes count for
    name: str  # suffix after the parameter's name, for display only
    dtype: str  # its dtype
    sharded_from_stage: int  # the first ZeRO stage at which a rank holds only its shard
    mask: int  # the phases in which it is live
    citation: str  # its source
    gradient_shaped: bool = False  # whether it is as large as autograd's gradient
    role: Role = Role.OTHER  # what it is used for

    def axes(self, parameter: LocalParameter, ranks: int) -> tuple[Axis, ...]:
        """Return the axes of this copy before it is sharded across `ranks`; a shard is always of the parameter."""
        return parameter.gradient if self.gradient_shaped and parameter.gradient and ranks == 1 else parameter.axes


def copy_row(copy: ParameterCopy, parameter: LocalParameter, shards: ShardCounts) -> RowDraft:
    """Return the copy of one parameter on one rank as an item."""
    ranks = shards.over(parameter)
    shape, elements, formula = _share(copy.axes(parameter, ranks), ranks, shards.engine, shards.axis(parameter))
    item_bytes = DTYPE_BYTES[copy.dtype]
    each = item_bytes * elements
    return RowDraft(
        copy.component,
        parameter.module,
        parameter.tensor + copy.name,
        shape,
        copy.dtype,
        parameter.count,
        each,
        rounded(each),
        copy.mask,
        f"{item_bytes}·{formula}",
        copy.citation,
    )


@lru_cache(maxsize=4096)
def _share(axes: tuple[Axis, ...], ranks: int, engine: str, axis: int) -> tuple[tuple[int, ...], int, str]:
    """Return one rank's shard of a parameter: shape, number of elements, and that number in symbols."""
    sizes = tuple(size for _, size in axes)
    shape = (*sizes[:axis], *shard_shape(sizes[axis:], ranks, engine))
    return shape, prod(shape), formula_of(axes) + ("/N" if ranks > 1 else "")
