"""Tensors that are made before the first step."""

from __future__ import annotations

from typing import NamedTuple

from memcalc.estimation.sharding import Held
from memcalc.ledger.component import Component
from memcalc.workspaces import Script


class Made(NamedTuple):
    """A tensor: its bytes, what is made on the way to it and freed once it is there, and whether it stays itself.

    `parameter`: whose weight it is.
    `component`: what it is for.
    `several`: the requests of several tensors that are made in one, where it is not one tensor; what they leave stays.
    """

    size: int
    before: Script = ()
    stays: bool = True
    parameter: Held | None = None
    several: Script = ()
    component: Component = Component.WEIGHTS


class Built(NamedTuple):
    """Tensors that are made one after the other, and the phases in which they are held."""

    mask: int
    tensors: tuple[Made, ...]
    replaced: tuple[Made, ...] = ()  # as many that are made before, each of which goes when its successor is there
