"""Somebody's own module and inputs on another device: of the module its shapes and none of its values."""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined] # absent from the stub
from torch.utils import _pytree as pytree

from memcalc.errors import InputError


def place_module(module: nn.Module, device: torch.device) -> nn.Module:
    """A deep copy whose parameters and buffers are new tensors on the device; the module itself stays as it is.

    As after `module.to(device)`: what it holds otherwise stays on the host, and tied parameters stay tied. No
    parameter's data is read, so the module may lie on the meta device.

    Raises:
        InputError: a parameter has no shape yet, or something in the module cannot be copied.
    """
    placed: dict[int, Any] = {}  # what deepcopy takes for copied already, by identity
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
    originals = list(chain(module.parameters(), module.buffers()))  # deepcopy goes by identity: they must stay alive
    try:
        found: nn.Module = copy.deepcopy(module, placed)
    except (RuntimeError, TypeError) as error:
        raise InputError(
            f"the module cannot be copied: {error}.",
            "Keep out of its attributes what copy.deepcopy refuses: tensors that were computed, locks, open files.",
            "module",
        ) from error
    del originals
    return found


def place_inputs(inputs: Any, device: torch.device) -> Any:
    """The same tree with new tensors on the device in place of its tensors; what else it holds stays."""
    return pytree.tree_map_only(Tensor, lambda tensor: _placed(tensor, device), inputs)


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors of a tree, in its order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _placed(tensor: Tensor, device: torch.device) -> Tensor:
    if not tensor.is_meta:  # with its values, where the device has some
        with torch.no_grad():
            copy = tensor.clone() if tensor.device == device else tensor.to(device)
        return copy.requires_grad_(tensor.requires_grad)
    # Zeros are valid indices, wherever a device has values.
    return _empty(tensor, device).zero_().requires_grad_(tensor.requires_grad)


def _empty(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
