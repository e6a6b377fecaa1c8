"""Tensors that are allocated before the first step."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from memcalc.layout.local_parameters import LocalParameter
from memcalc.ledger.component import Component
from memcalc.workspaces import Script


class InitialTensor(NamedTuple):
    """A tensor: its bytes, the temporaries of its construction, and whether it stays allocated.

    Args:
        size: bytes.
        before: requests of the construction, freed once the tensor exists.
        stays: whether the tensor stays allocated.
        parameter: the parameter that the tensor stores; None for other tensors.
        several: instead of `size`, the requests of several tensors constructed together; what they do not free stays.
        component: component of the tensor.
    """

    size: int
    before: Script = ()
    stays: bool = True
    parameter: LocalParameter | None = None
    several: Script = ()
    component: Component = Component.WEIGHTS


class InitialTensors(NamedTuple):
    """Tensors that are allocated in order, and the phases in which they are live.

    Args:
        mask: bit set of the phases.
        tensors: the tensors in order.
        replaced: as many tensors allocated before; each is freed when its successor exists.
        groups: the group of each tensor, with which it is freed; empty: they are freed after the phases.
        frees: the group of earlier tensors that is freed once these exist.
        empties_cache: whether torch.cuda.empty_cache() follows.
    """

    mask: int
    tensors: tuple[InitialTensor, ...]
    replaced: tuple[InitialTensor, ...] = ()
    groups: tuple[Hashable, ...] = ()
    frees: Hashable = None
    empties_cache: bool = False
