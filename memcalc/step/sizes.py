"""Number of elements of a module."""

from __future__ import annotations

from torch import nn

from memcalc.step.quantization import elements


def sizes_of(module: nn.Module) -> tuple[int, int, int]:
    """Return the elements of parameters, trained parameters and buffers; quantized weights by their original shape."""
    parameters = list(module.parameters())
    return (
        sum(elements(parameter) for parameter in parameters),
        sum(elements(parameter) for parameter in parameters if parameter.requires_grad),
        sum(buffer.numel() for buffer in module.buffers()),
    )
