"""Dropout that keeps one byte an element on every device.

torch.nn.functional.dropout does so on CUDA, by this operator; on the CPU it would keep a mask in the tensor's dtype
(torch 2.13, aten/src/ATen/native/Dropout.cpp).
"""

from __future__ import annotations

import torch
from torch import Tensor


def dropout(x: Tensor, rate: float, *, training: bool) -> Tensor:
    """The tensor with a share of its elements set to zero, and the rest scaled; itself where nothing is to be done."""
    if not training or rate == 0.0:
        return x
    return torch.native_dropout(x, rate, True)[0]
