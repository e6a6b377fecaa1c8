"""LayerNorm, operator by operator: memcalc trace docs/examples/modules/layer_norm.py:LayerNorm."""

import torch
from torch import Tensor, nn


class LayerNorm(nn.Module):
    """(x - mean) / (deviation + eps) times a weight, over a vector of ten values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(10))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize a vector. Backward needs the quotient, since only the weight is trained."""
        normalized: Tensor = (x - x.mean()) / (x.std() + 1e-6)
        return normalized * self.weight


def make_inputs() -> Tensor:
    """Return ten values."""
    return torch.rand(10)
