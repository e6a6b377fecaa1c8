"""What an operator made of its arguments, as far as it holds for other tensors of the same shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memcalc.recorder.dense import span
from memcalc.recorder.storages import identity

NEVER = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
OURS = frozenset({"aten", "memcalc"})  # whose operators' outputs depend on nothing but their arguments


class Made(NamedTuple):
    """One output.

    Args:
        shape: of the tensor, with its strides, and its offset into the storage in elements.
        stride: likewise.
        offset: likewise.
        dtype: of the elements.
        source: which of the tensor arguments it is a view of; None: new memory.
        itself: it is that argument, not a view of it.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    source: int | None
    itself: bool

    @classmethod
    def of(cls, output: Tensor, given: Given) -> Made:
        """An output beside the tensors that were given."""
        itself = given.tensors.get(id(output))
        source = given.storages.get(identity(output.untyped_storage())) if itself is None else itself
        shape, stride, offset = tuple(output.shape), output.stride(), int(output.storage_offset())
        return cls(shape, stride, offset, output.dtype, source, itself is not None)


class Given(NamedTuple):
    """Where the tensors that were given stand, the first of equal ones: optimizers hand over a thousand.

    Args:
        tensors: by what tells the tensor from others.
        storages: likewise the storage.
    """

    tensors: dict[int, int]
    storages: dict[int, int]

    @classmethod
    def of(cls, given: Sequence[Tensor]) -> Given:
        """The tensors, which are alive."""
        last = range(len(given) - 1, -1, -1)
        storages = {identity(given[place].untyped_storage()): place for place in last}
        return cls({id(given[place]): place for place in last}, storages)


class Known(NamedTuple):
    """All outputs of an operator: one, a list or tuple of them, or none at all.

    Args:
        kind: Tensor, list or tuple; None: it gives nothing.
        made: the outputs; numbers are themselves.
        device: that new tensors say they are on; "meta" has no memory.
    """

    kind: type | None
    made: tuple[Made | int | None, ...]
    device: torch.device

    @classmethod
    def of(cls, operator: Any, given: Sequence[Tensor], output: Any, device: torch.device) -> Known | None:
        """The outputs of an operator; None where they do not hold for other tensors.

        Args:
            operator: what was run.
            given: the tensors among its arguments.
            output: what it gave.
            device: that new tensors say they are on.
        """
        if operator.namespace not in OURS or not NEVER.isdisjoint(operator.tags):
            return None
        if output is None:
            return cls(None, (), device)
        several = isinstance(output, (list, tuple))
        made: list[Made | int | None] = []
        places = Given.of(given)
        fresh: set[int] = set()  # storages
        for each in output if several else (output,):
            if each is None or type(each) is int:
                made.append(each)
                continue
            if not isinstance(each, Tensor) or each.is_conj():
                return None
            one = Made.of(each, places)
            made.append(one)
            if each.requires_grad and not one.itself:
                return None
            if one.source is None:
                storage = each.untyped_storage()
                whole = span(each.shape, each.stride()) * each.element_size()
                if identity(storage) in fresh or each.storage_offset() or storage.nbytes() != whole:
                    return None
                fresh.add(identity(storage))
            elif one.itself and torch.Tag.inplace_view in operator.tags:
                return None  # resize_, set_, t_ and their like: an argument is something else afterwards
        kind = list if isinstance(output, list) else tuple  # of tuples with names a plain one
        return cls(kind if several else Tensor, tuple(made), device)
