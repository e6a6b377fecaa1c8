"""Known values: small tensors of integers and Booleans, and short lists of numbers, have real values.

They decide shapes, masks and loops: how many tokens of a sequence represent an image, or how long each image is. Every
small fake tensor with values from the host has a real tensor; an operator with known values of all inputs also runs
on these. A value that depends on anything else is unknown (`selections.py`, `readbacks.py`). The null device does the
same with the same limits (nullcuda/src/values.cpp).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from memcalc.recorder.kernels import tensors
from memcalc.recorder.storages import holds_tensors, identity

aten = torch.ops.aten

LARGEST = 2**20  # elements of a tensor of integers or Booleans
LARGEST_VIEW = 2**26  # elements of a view with repeated elements: an expanded mask
LARGEST_FLOATS = 256  # of floats: a number, a short list

# They create values from numbers only; a tensor argument gives its shape.
CREATORS = frozenset(
    {
        *(aten.arange, aten.zeros, aten.ones, aten.full, aten.eye, aten.linspace, aten.scalar_tensor),
        *(aten.zeros_like, aten.ones_like, aten.full_like, aten.new_zeros, aten.new_ones, aten.new_full),
        *(aten.zero_, aten.tril_indices, aten.triu_indices),
    }
)

# Their outputs have no values until they are written.
UNWRITTEN = frozenset({aten.empty_like, aten.new_empty, aten.new_empty_strided, aten.resize_, aten.set_})


class Values:
    """Known values of storages."""

    def __init__(self) -> None:
        self._mirrors: dict[int, tuple[torch.UntypedStorage, weakref.ref[Any]]] = {}  # by address of the C++ storage

    def of(self, tensor: Any) -> Tensor | None:
        """Return the real tensor of a fake one, or a real tensor itself; None if the values are unknown."""
        if not isinstance(tensor, FakeTensor):
            return None if tensor.is_meta or holds_tensors(tensor) else tensor
        found = self._mirrors.get(identity(tensor.untyped_storage()))
        return None if found is None or tensor.numel() > LARGEST_VIEW else _view(found[0], tensor)

    def _knows(self, tensor: Any) -> bool:
        if not isinstance(tensor, FakeTensor):  # a host tensor; meta tensors have no values
            return not (tensor.is_meta or holds_tensors(tensor))
        return identity(tensor.untyped_storage()) in self._mirrors and tensor.numel() <= LARGEST_VIEW

    def learn(self, tensor: Any, real: Tensor) -> None:
        """Store the values of a fake tensor, if it is small enough."""
        if not _is_small(tensor):
            return
        storage = tensor.untyped_storage()
        with _disable_current_modes():
            mirror = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
            _view(mirror, tensor).copy_(real)
        key = identity(storage)
        self._mirrors[key] = mirror, weakref.ref(storage, lambda _: self._mirrors.pop(key, None))

    def forget(self, tensor: Tensor) -> None:
        """Mark the values as unknown."""
        self._mirrors.pop(identity(tensor.untyped_storage()), None)

    def number(self, tensor: Any) -> Any:
        """Return the number in a tensor of one element; None if it is unknown."""
        known = self.of(tensor)
        with _disable_current_modes():
            return None if known is None else known.item()

    def selected(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the output of an operator with a data-dependent size if all values are known; else NotImplemented."""
        given = list(tensors((*args, *kwargs.values())))
        if not given or any(self.of(tensor) is None for tensor in given):
            return NotImplemented
        real = self._computed(operator, args, kwargs)
        outputs = real if isinstance(real, (tuple, list)) else (real,)
        like = next(tensor for tensor in given if isinstance(tensor, FakeTensor))
        made = []
        for each in outputs:
            fake = like.new_empty(each.shape, dtype=each.dtype)
            self.learn(fake, each)
            made.append(fake)
        return type(real)(made) if isinstance(real, (tuple, list)) else made[0]

    def note(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """Compute an operator's known values.

        Args:
            operator: an operator of PyTorch that has run on fake tensors.
            args: its arguments.
            kwargs: its keyword arguments.
            output: its output.
        """
        if operator.overloadpacket in CREATORS:
            self._create(operator, args, kwargs, output)
            return
        first = True
        if operator.overloadpacket in UNWRITTEN:
            return
        for tensor in tensors((*args, *kwargs.values())):
            if not self._knows(tensor):
                if not first and operator._schema.is_mutable:  # noqa: SLF001 -- no public name
                    self.forget(next(tensors(args)))
                return
            first = False
        changes = operator._schema.is_mutable  # noqa: SLF001 -- no public name
        if first or not (changes or any(_is_small(each) for each in tensors((output,)))):
            return
        if torch.Tag.nondeterministic_seeded in operator.tags:
            if changes:
                self.forget(next(tensors(args)))
            return
        real = self._computed(operator, args, kwargs)
        self._keep(output, real)

    def _create(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        if not _is_small(output):
            return
        if operator.overloadpacket is aten.zero_ and self.of(output) is not None:
            self._computed(operator, args, kwargs)
            return
        with _disable_current_modes():
            # Values of a tensor that gives its shape only are not needed.
            shaped = tuple(torch.empty(x.shape, dtype=x.dtype) if isinstance(x, Tensor) else x for x in args)
            real = operator(*shaped, **_on_host(kwargs))
        self.learn(output, real)

    def _computed(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with _disable_current_modes():
            return operator(*map(self._real, args), **{k: self._real(v) for k, v in _on_host(kwargs).items()})

    def _real(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.of(value)
        if isinstance(value, (tuple, list)):
            return [self._real(each) for each in value]
        return value

    def _keep(self, output: Any, real: Any) -> None:
        """Store an operator's output; views and in-place results are known by their storages."""
        if isinstance(output, (tuple, list)):
            for each, value in zip(output, real, strict=True):
                self._keep(each, value)
        elif isinstance(output, FakeTensor) and identity(output.untyped_storage()) not in self._mirrors:
            self.learn(output, real)


def _view(mirror: torch.UntypedStorage, like: Tensor) -> Tensor:
    """Return the view of a mirror that corresponds to a fake tensor in its storage."""
    with _disable_current_modes():
        bare = torch.empty(0, dtype=like.dtype)
        return bare.set_(mirror, like.storage_offset(), tuple(like.shape), like.stride())


def _is_small(tensor: Any) -> bool:
    """Return whether the values of a tensor are stored, by the size of its storage."""
    if not isinstance(tensor, FakeTensor) or tensor.fake_device.type == "meta":
        return False
    floats = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    elements = tensor.untyped_storage().nbytes() // max(tensor.dtype.itemsize, 1)
    return elements <= (LARGEST_FLOATS if floats else LARGEST)


def _on_host(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: torch.device("cpu") if name == "device" and value is not None else value for name, value in kwargs.items()
    }
