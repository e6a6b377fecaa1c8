"""Copies of a user's module and inputs on another device: the shapes of the module, but not its values."""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]  # absent from the stub
from torch.utils import _pytree as pytree

from memcalc.errors import InputError


def place_module(module: nn.Module, device: torch.device) -> nn.Module:
    """Return a deep copy with new tensors on the device as parameters and buffers; the module is not changed.

    As after `module.to(device)`, other tensors stay on the host and tied parameters stay tied. No parameter data is
    read,
    so the module may be on the meta device.

    Raises:
        InputError: a parameter has no shape yet, or a part of the module cannot be copied.
    """
    placed: dict[int, Any] = {}  # deepcopy's memo of copied objects, by id
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedTensorMixin):
            raise InputError(
                f"the parameter {name} has no shape before the module's first forward.",
                "Call the module once before it is traced.",
                "module",
            )
        placed[id(parameter)] = nn.Parameter(_empty(parameter, device), requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        placed[id(buffer)] = _empty(buffer, device)
    originals = list(chain(module.parameters(), module.buffers()))  # kept alive: deepcopy identifies them by id
    try:
        found: nn.Module = copy.deepcopy(module, placed)
    except (RuntimeError, TypeError) as error:
        raise InputError(
            f"the module cannot be copied: {error}.",
            "Remove attributes that copy.deepcopy rejects: computed tensors, locks, open files.",
            "module",
        ) from error
    del originals
    return found


def place_inputs(inputs: Any, device: torch.device) -> Any:
    """Return the same tree with its tensors copied to the device; other leaves are unchanged."""
    return pytree.tree_map_only(Tensor, lambda tensor: _placed(tensor, device), inputs)


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree, in its order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _placed(tensor: Tensor, device: torch.device) -> Tensor:
    if not tensor.is_meta:  # with its values, if the device has values
        with torch.no_grad():
            copy = tensor.clone() if tensor.device == device else tensor.to(device)
        return copy.requires_grad_(tensor.requires_grad)
    # Zeros are valid indices on a device with values.
    return _empty(tensor, device).zero_().requires_grad_(tensor.requires_grad)


def _empty(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
