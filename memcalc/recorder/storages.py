"""Lifetimes of storages: from the first tensor that uses one to its free.

Storages rather than tensors: views cost nothing, tied weights count once, and changes by `resize_` and `set_` count.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Number = int  # of one lifetime; never reused, unlike addresses


def identity(storage: torch.UntypedStorage) -> int:
    """Return the address of a storage's C++ object, which is unique among live storages."""
    address: int = storage._cdata  # noqa: SLF001 -- no public name
    return address


def holds_tensors(value: Any) -> bool:
    """Return whether a tensor is a DTensor or similar: it has no memory, only its inner tensors have."""
    return isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__")


def part_here(tensor: Tensor) -> Tensor:
    """Return the rank's local tensor of a DTensor; for an async collective's result, the result itself."""
    while (part := getattr(tensor, "_local_tensor", getattr(tensor, "elem", None))) is not None:
        tensor = part
    return tensor


class Storages:
    """Every live storage, numbered in the order of first use.

    PyTorch keeps one Python object per storage while the storage is live, so a weak reference to the object reports its
    end (torch/csrc/StorageMethods.cpp, "PyObject preservation").

    Args:
        ended: called with a storage's number when the storage is freed.
    """

    def __init__(self, ended: Callable[[Number], None]) -> None:
        self._ended = ended
        self._live: dict[int, tuple[Number, int, weakref.ref[Any]]] = {}  # by address of the storage's C++ object
        self._next = 0

    def see(self, tensor: Tensor) -> Number | None:
        """Return a number for the tensor's storage if it is new; None if it is known or has no bytes."""
        storage = tensor.untyped_storage()
        key = identity(storage)
        if key in self._live or not storage.nbytes():
            return None
        return self._begin(key, storage)

    def number(self, tensor: Tensor) -> Number | None:
        """Return the number of the tensor's storage; None if it was never seen."""
        found = self._live.get(identity(tensor.untyped_storage()))
        return None if found is None else found[0]

    def changed(self, storage: torch.UntypedStorage) -> Number | None:
        """End the lifetime of a storage if its size changed, and begin another if it has bytes.

        Returns:
            the number of the new lifetime; None if there is none.
        """
        key, size = identity(storage), storage.nbytes()
        known = self._live.get(key)
        if known is not None:
            if known[1] == size:
                return None
            del self._live[key]
            self._ended(known[0])
        return self._begin(key, storage) if size else None

    def _begin(self, key: int, storage: torch.UntypedStorage) -> Number:
        number = self._next
        self._next += 1

        def end(_: object) -> None:
            del self._live[key]
            self._ended(number)

        self._live[key] = (number, storage.nbytes(), weakref.ref(storage, end))
        return number


@contextmanager
def calling_on_resize(
    changed: Callable[[torch.UntypedStorage], None], run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
) -> Iterator[None]:
    """Call `changed` after each `storage.resize_()` inside, which is not an operator: FSDP2 frees its buffers with it.

    Args:
        changed: called with the storage.
        run: called with the resizing function and its arguments; calls it and returns its result.
    """
    original = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = run(original, (storage, size), {})
        changed(storage)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether the elements are contiguous and non-overlapping under some order of the axes."""
    extent = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size != 1 and step != extent:
            return False
        extent *= size
    return True


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements from the first to the last."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
