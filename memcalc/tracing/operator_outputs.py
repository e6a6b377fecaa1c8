"""Outputs of an operator, in a form that holds for other tensors of the same shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memcalc.recorder.storages import identity, span

NEVER = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
OURS = frozenset({"aten", "memcalc"})  # operators in these namespaces have outputs that depend on their arguments only


class OperatorOutput(NamedTuple):
    """One output."""

    shape: tuple[int, ...]  # its shape
    stride: tuple[int, ...]  # its strides in elements
    offset: int  # its offset into the storage in elements
    dtype: torch.dtype  # its dtype
    source: int | None  # index of the tensor argument that it is a view of; None: new memory
    itself: bool  # whether it is that argument, rather than a view of it

    @classmethod
    def of(cls, output: Tensor, given: ArgumentPositions) -> OperatorOutput:
        """Return the description of an output, given the tensor arguments."""
        itself = given.tensors.get(id(output))
        source = given.storages.get(identity(output.untyped_storage())) if itself is None else itself
        shape, stride, offset = tuple(output.shape), output.stride(), int(output.storage_offset())
        return cls(shape, stride, offset, output.dtype, source, itself is not None)


class ArgumentPositions(NamedTuple):
    """Positions of tensor arguments; the first one of equals. Optimizers pass a thousand tensors."""

    tensors: dict[int, int]  # position by id of the tensor
    storages: dict[int, int]  # position by identity of the storage

    @classmethod
    def of(cls, given: Sequence[Tensor]) -> ArgumentPositions:
        """Return the positions of these tensors, which must be alive."""
        last = range(len(given) - 1, -1, -1)
        storages = {identity(given[place].untyped_storage()): place for place in last}
        return cls({id(given[place]): place for place in last}, storages)


class OperatorOutputs(NamedTuple):
    """All outputs of an operator: one, a list or tuple, or none."""

    container: type | None  # Tensor, list or tuple; None: no output
    results: tuple[OperatorOutput | int | None, ...]  # the outputs; numbers are stored themselves
    device: torch.device  # the device that new tensors report; "meta" has no memory

    @classmethod
    def of(cls, operator: Any, given: Sequence[Tensor], output: Any, device: torch.device) -> OperatorOutputs | None:
        """Return the description of an operator's outputs; None if it would not hold for other tensors.

        Args:
            operator: the operator that ran.
            given: the tensors among its arguments.
            output: its output.
            device: the device that new tensors report.
        """
        if operator.namespace not in OURS or not NEVER.isdisjoint(operator.tags):
            return None
        if output is None:
            return cls(None, (), device)
        several = isinstance(output, (list, tuple))
        made: list[OperatorOutput | int | None] = []
        places = ArgumentPositions.of(given)
        fresh: set[int] = set()  # identities of storages
        for each in output if several else (output,):
            if each is None or type(each) is int:
                made.append(each)
                continue
            if not isinstance(each, Tensor) or each.is_conj():
                return None
            one = OperatorOutput.of(each, places)
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
                return None  # resize_, set_, t_ and similar change an argument's geometry
        kind = list if isinstance(output, list) else tuple  # a named tuple becomes a plain tuple
        return cls(kind if several else Tensor, tuple(made), device)
