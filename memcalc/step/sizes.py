"""How large a module is."""

from __future__ import annotations

from torch import nn


def sizes_of(module: nn.Module) -> tuple[int, int, int]:
    """Parameters, those of them that are trained, and elements of buffers."""
    parameters = list(module.parameters())
    return (
        sum(parameter.numel() for parameter in parameters),
        sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        sum(buffer.numel() for buffer in module.buffers()),
    )
