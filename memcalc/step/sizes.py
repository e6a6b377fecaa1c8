"""How large a module is."""

from __future__ import annotations

from torch import nn

from memcalc.step.quantised import elements


def sizes_of(module: nn.Module) -> tuple[int, int, int]:
    """Parameters, those of them that are trained, and elements of buffers; of a quantised matrix what it stands for."""
    parameters = list(module.parameters())
    return (
        sum(elements(parameter) for parameter in parameters),
        sum(elements(parameter) for parameter in parameters if parameter.requires_grad),
        sum(buffer.numel() for buffer in module.buffers()),
    )
