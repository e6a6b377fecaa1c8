"""Base class of a plain layer's modules, attention and MLP, which share the layer's tape and options."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memcalc.architectures.plain import PlainBlock


class PlainModule:
    """A module of a plain layer, with the layer's tape and options."""

    def __init__(self, layer: PlainBlock) -> None:
        self.layer = layer
        self.c = layer.c
        self.tape = layer.tape
        self.ops = layer.ops
        self.split = layer.split
        self.axis = layer.axis
