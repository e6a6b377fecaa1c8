"""Dropout that saves one byte per element on every device.

torch.nn.functional.dropout does so on CUDA, with this operator; on the CPU it saves a mask in the tensor's dtype
(torch 2.13, aten/src/ATen/native/Dropout.cpp).
"""

from __future__ import annotations

import torch
from torch import Tensor


def dropout(x: Tensor, rate: float, *, training: bool) -> Tensor:
    """Return the tensor with a fraction of its elements zeroed and the rest scaled; unchanged without dropout."""
    if not training or rate == 0.0:
        return x
    return torch.native_dropout(x, rate, True)[0]
