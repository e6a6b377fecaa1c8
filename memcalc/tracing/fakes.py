"""Fast construction of fake tensors around meta tensors: a trace makes tens of thousands."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

Ints = tuple[int, ...]

NOTHING = torch._C._DisableTorchDispatch  # noqa: SLF001 -- no public name


class Fakes:
    """Makes fake tensors: the first of each device by the constructor, the others with a copy of its attributes.

    The constructor checks its arguments and slowly sets twenty attributes, which are equal each time.
    """

    def __init__(self) -> None:
        self._attributes: dict[tuple[FakeTensorMode, torch.device], dict[str, Any]] = {}

    def new(
        self, mode: FakeTensorMode, shape: Ints, stride: Ints, dtype: torch.dtype, device: torch.device
    ) -> FakeTensor:
        """Return a fake tensor with new memory.

        Args:
            mode: the mode that it belongs to.
            shape: its shape.
            stride: its strides in elements.
            dtype: its dtype.
            device: the device that it reports.
        """
        with NOTHING():
            bare = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return self._around(mode, bare, device)

    def view(self, source: FakeTensor, shape: Ints, stride: Ints, offset: int, dtype: torch.dtype) -> FakeTensor:
        """Return a view of a fake tensor's memory; the offset is in elements of the view."""
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
        if mode._allow_unsafe_data_ptr_access:  # noqa: SLF001 -- as above
            torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)  # noqa: SLF001 -- as above
        else:
            torch._C._set_throw_on_mutable_data_ptr(fake)  # noqa: SLF001 -- as above
        vars(fake).update(attributes)
        return fake
