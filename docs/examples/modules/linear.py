"""An fp32 linear layer with one row of input: memcalc trace docs/examples/modules/linear.py:make_model."""

import torch
from torch import Tensor, nn


def make_model() -> nn.Module:
    """Return Linear(256, 250): a weight of 256,000 bytes and a bias of 1,000, which takes 1,024."""
    return nn.Linear(256, 250)


def make_inputs() -> Tensor:
    """Return one row of 256 fp32 values: 1,024 bytes."""
    return torch.randn(1, 256)


def make_batch() -> Tensor:
    """Return 100 rows: 102,400 bytes."""
    return torch.randn(100, 256)
