"""Reads of data-dependent values on the host: they return zero and are counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverloadPacket
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

# Functions that turn a tensor into a Python value.
READS = frozenset(
    {
        Tensor.item,
        Tensor.tolist,
        Tensor.__bool__,
        Tensor.__float__,
        Tensor.__int__,
        Tensor.__index__,
        Tensor.numpy,
        Tensor.cpu,
        Tensor.equal,
        Tensor.allclose,
        torch.equal,
        torch.allclose,
    }
)
OF_DATA = frozenset({torch.tensor, torch.as_tensor, torch.asarray})  # they read the tensors in a list, number by number
NUMBERS = frozenset({"float", "int", "number"})  # argument types in operator schemas


def zero_for(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the function's result for zeros in place of its first tensor."""
    tensor: Tensor = args[0]
    with _disable_current_modes():
        return function(torch.zeros(tensor.shape, dtype=tensor.dtype), *args[1:], **kwargs)


def numbers_in(data: Any, read: Callable[[FakeTensor], Any]) -> Any:
    """Return data for a new tensor, with each fake tensor in its lists replaced by its numbers."""
    if isinstance(data, (tuple, list)):
        return [numbers_in(each, read) for each in data]
    return read(data) if isinstance(data, FakeTensor) else data


def without_reads(
    operator: Any, args: tuple[Any, ...], has_no_value: Callable[[Any], bool]
) -> tuple[tuple[Any, ...], int]:
    """Return an operator's arguments with zeros where PyTorch would read numbers from tensors; and their count.

    Args:
        operator: as Python calls it; bitsandbytes' LAMB passes a norm in this way.
        args: its arguments.
        has_no_value: returns whether an argument is a tensor without values.
    """
    overload = getattr(operator, "default", None) if isinstance(operator, OpOverloadPacket) else None
    if overload is None:
        return args, 0
    kinds = [str(argument.type) for argument in overload._schema.arguments]  # noqa: SLF001 -- no public name
    read = [kind in NUMBERS and has_no_value(value) for value, kind in zip(args, kinds, strict=False)]
    return tuple(0 if is_read else value for value, is_read in zip(args, read, strict=False)), sum(read)


class DeviceReads(TorchFunctionMode):
    """Mode that lets a program on fake tensors read values; constants that PyTorch knows keep theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.readbacks = 0

    def __torch_function__(  # noqa: D105
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in OF_DATA and args and isinstance(args[0], (tuple, list)):
            args = (numbers_in(args[0], self._numbers), *args[1:])
        args, read = without_reads(function, args, lambda value: isinstance(value, FakeTensor))
        self.readbacks += read
        try:
            return function(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if function not in READS:
                raise
            self.readbacks += 1
            return zero_for(function, args, kwargs or {})

    def _numbers(self, fake: FakeTensor) -> Any:
        return fake.item() if fake.numel() == 1 else [self._numbers(each) for each in fake]
