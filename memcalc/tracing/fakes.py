"""Fake tensors around meta tensors, quicker than their own constructor makes them: a trace makes tens of thousands."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

Ints = tuple[int, ...]

NOTHING = torch._C._DisableTorchDispatch  # noqa: SLF001 -- no public name


class Fakes:
    """Makes fake tensors: the first of each device by its constructor, the others with the attributes that it got.

    The constructor checks its arguments and sets twenty attributes, the same each time, most of them slowly.
    """

    def __init__(self) -> None:
        self._attributes: dict[tuple[FakeTensorMode, torch.device], dict[str, Any]] = {}

    def new(
        self, mode: FakeTensorMode, shape: Ints, stride: Ints, dtype: torch.dtype, device: torch.device
    ) -> FakeTensor:
        """One with new memory.

        Args:
            mode: that it belongs to.
            shape: with strides in elements.
            stride: likewise.
            dtype: of the elements.
            device: that it says it is on.
        """
        with NOTHING():
            bare = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return self._around(mode, bare, device)

    def view(self, source: FakeTensor, shape: Ints, stride: Ints, offset: int, dtype: torch.dtype) -> FakeTensor:
        """One with the memory of another; its offset is in elements of its own."""
        with NOTHING():
            bare = torch.empty_strided((0,), (1,), dtype=dtype, device="meta")
            bare.set_(source.untyped_storage(), offset, shape, stride)
        return self._around(source.fake_mode, bare, source.fake_device)

    def _around(self, mode: FakeTensorMode, bare: Tensor, device: torch.device) -> FakeTensor:
        attributes = self._attributes.get((mode, device))
        if attributes is None:
            first = FakeTensor(mode, bare, device)
            self._attributes[mode, device] = dict(vars(first))
            return first
        fake = Tensor._make_subclass(FakeTensor, bare, dispatch_device=True, device_for_backend_keys=device)  # noqa: SLF001 -- as the constructor does
        if mode._allow_unsafe_data_ptr_access:  # noqa: SLF001 -- likewise
            torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)  # noqa: SLF001 -- likewise
        else:
            torch._C._set_throw_on_mutable_data_ptr(fake)  # noqa: SLF001 -- likewise
        vars(fake).update(attributes)
        return fake
