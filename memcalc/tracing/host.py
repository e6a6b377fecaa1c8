"""Host memory of offloaded tensors without a GPU: these tensors are fake too, on a separate device.

Real shards of a large model and its optimizer states would fill the host, and the update would take time, although
their values are never read. PyTorch's C++ sees all of them on the CPU; "cpu:0" is the host's device, "cpu" the GPU's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memcalc.events.event import PAGEABLE, PINNED
from memcalc.recorder.storages import identity, part_here
from memcalc.step.host import HOST


def on_host(value: Any) -> bool:
    """Return whether a tensor is offloaded to the host."""
    if not isinstance(value, Tensor):
        return False
    part = part_here(value)
    return isinstance(part, FakeTensor) and part.fake_device == HOST


class OffloadedTensors:
    """Tensors that the run has offloaded.

    `is_fake` is set by the first one: from then on, copies from the device to the host are fake too.
    """

    def __init__(self) -> None:
        self.is_fake = False
        self._pins = False  # whether a function is running that allocates pinned memory
        self._pinned: dict[int, weakref.ref[Any]] = {}  # by address of the storage's C++ object
        self.answers: dict[Any, Callable[[Tensor], Any]] = {
            Tensor.pin_memory: self._pin,
            Tensor.is_pinned: self.is_pinned,
            Tensor.cpu: lambda tensor: tensor,
        }

    def copied_back(self, tensor: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """Return `tensor.to("cpu", ...)`; it is pinned for a non-blocking copy (native/TensorConversions.cpp)."""
        if on_host(tensor):
            return tensor
        return self._made(tensor, pinned=bool(kwargs.get("non_blocking")))

    def memory(self, tensor: Tensor) -> int | None:
        """Return the type of host memory of a tensor that is being allocated; None if it is not the host's."""
        if not on_host(tensor):
            return None
        return PINNED if self._pins else PAGEABLE

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether a tensor's memory is pinned."""
        return identity(tensor.untyped_storage()) in self._pinned

    def _pin(self, tensor: Tensor) -> Tensor:
        return tensor if self.is_pinned(tensor) else self._made(tensor, pinned=True)

    def page_locked(self, *size: Any, **kwargs: Any) -> Tensor:
        """Return `torch.empty(..., pin_memory=True)`."""
        return self._made(torch.empty(*size, dtype=kwargs.get("dtype"), device="meta"), pinned=True)

    def save_on_cpu(self, mode: AbstractContextManager[object]) -> type[torch.autograd.graph.save_on_cpu]:
        """Return PyTorch's class with hooks that run inside the mode, also if an operator calls them."""
        host = self

        class OffloadPlay(torch.autograd.graph.save_on_cpu):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                host.is_fake = True
                pack, unpack = self.pack_hook, self.unpack_hook
                self.pack_hook = lambda tensor: inside(pack, tensor)
                self.unpack_hook = lambda packed: inside(unpack, packed)

        def inside(hook: Callable[[Any], Any], given: Any) -> Any:
            active = torch._C._len_torch_function_stack() > 0  # noqa: SLF001 -- as in backward, see `run_backward`
            with nullcontext() if active else mode, mock.patch.object(torch.cuda, "is_available", return_value=True):
                return hook(given)

        return OffloadPlay

    def _made(self, like: Tensor, *, pinned: bool) -> Tensor:
        self._pins = pinned
        try:
            found = torch.empty_like(like, device=HOST)  # dense, in the order of its axes
        finally:
            self._pins = False
        if pinned:
            storage = found.untyped_storage()
            key = identity(storage)
            self._pinned[key] = weakref.ref(storage, lambda _: self._pinned.pop(key, None))
        return found
