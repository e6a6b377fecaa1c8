"""Two linear layers with ReLU and Sigmoid: memcalc trace docs/examples/modules/relu_sigmoid.py:make_model."""

import torch
from torch import Tensor, nn


def make_model() -> nn.Module:
    """Return 200 -> 100 -> 200. ReLU and Sigmoid save their outputs for backward, the linear layers their inputs."""
    return nn.Sequential(nn.Linear(200, 100), nn.ReLU(), nn.Linear(100, 200), nn.Sigmoid())


def make_inputs() -> Tensor:
    """Return five rows."""
    return torch.randn(5, 200)
