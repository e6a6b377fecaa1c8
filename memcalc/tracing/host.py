"""The host's side of offload, where the device is not there: its tensors are fake, too, on a device of their own.

Shards of a large model and its optimizer's states would fill the host, and the update take its time, for the sake of
values that nobody asks for. PyTorch's C++ sees all of them on the CPU; "cpu:0" are the host's, "cpu" the device's.
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
    """Whether a tensor was offloaded."""
    if not isinstance(value, Tensor):
        return False
    part = part_here(value)
    return isinstance(part, FakeTensor) and part.fake_device == HOST


class Host:
    """What the run has offloaded.

    `is_fake` once it has: what it fetches from the device then is as fake as what it has there.
    """

    def __init__(self) -> None:
        self.is_fake = False
        self._pins = False  # a function runs that makes pinned memory
        self._pinned: dict[int, weakref.ref[Any]] = {}  # by address of the storage's C++ object
        self.answers: dict[Any, Callable[[Tensor], Any]] = {
            Tensor.pin_memory: self._pin,
            Tensor.is_pinned: self.is_pinned,
            Tensor.cpu: lambda tensor: tensor,
        }

    def fetched(self, tensor: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """What `tensor.to("cpu", ...)` gives: pinned where nobody waits for it (native/TensorConversions.cpp)."""
        if on_host(tensor):
            return tensor
        return self._made(tensor, pinned=bool(kwargs.get("non_blocking")))

    def memory(self, tensor: Tensor) -> int | None:
        """Of a tensor that is being made: the kind of memory, if it is the host's."""
        if not on_host(tensor):
            return None
        return PINNED if self._pins else PAGEABLE

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether its memory is page-locked."""
        return identity(tensor.untyped_storage()) in self._pinned

    def _pin(self, tensor: Tensor) -> Tensor:
        return tensor if self.is_pinned(tensor) else self._made(tensor, pinned=True)

    def page_locked(self, *size: Any, **kwargs: Any) -> Tensor:
        """What `torch.empty(..., pin_memory=True)` gives."""
        return self._made(torch.empty(*size, dtype=kwargs.get("dtype"), device="meta"), pinned=True)

    def save_on_cpu(self, mode: AbstractContextManager[object]) -> type[torch.autograd.graph.save_on_cpu]:
        """PyTorch's own, whose hooks run inside a mode, as they do not by themselves where an operator calls them."""
        host = self

        class Played(torch.autograd.graph.save_on_cpu):
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

        return Played

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
