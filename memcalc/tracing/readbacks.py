"""Values that the host asks a device for and that do not exist: it is told zero, and how often is counted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

# What turns a tensor into a value of Python's.
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


def zero_for(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the function gives for zeros in place of its first tensor."""
    tensor: Tensor = args[0]
    with _disable_current_modes():
        return function(torch.zeros(tensor.shape, dtype=tensor.dtype), *args[1:], **kwargs)


class Readbacks(TorchFunctionMode):
    """Lets a program on fake tensors read values; constants that PyTorch knows keep theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.readbacks = 0

    def __torch_function__(  # noqa: D105
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            return function(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if function not in READS:
                raise
            self.readbacks += 1
            return zero_for(function, args, kwargs or {})
