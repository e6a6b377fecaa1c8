"""The lives of storages: who sees the first tensor of one, and who is told when the last is gone.

Storages, not tensors: views cost nothing, tied weights count once, and what `resize_` or `set_` change counts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Number = int  # of a storage's life: never used again, unlike addresses


def identity(storage: torch.UntypedStorage) -> int:
    """What tells a storage from all others that are alive: the address of its C++ object."""
    address: int = storage._cdata  # noqa: SLF001 -- no public name
    return address


def is_made_of_tensors(value: Any) -> bool:
    """Whether a tensor is a DTensor or its like: it has no memory, its parts have."""
    return isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__")


def part_here(tensor: Tensor) -> Tensor:
    """Of a DTensor what this rank holds; of a collective's result that nobody has waited for the result itself."""
    while (part := getattr(tensor, "_local_tensor", getattr(tensor, "elem", None))) is not None:
        tensor = part
    return tensor


class Storages:
    """Every storage that is alive, numbered in the order in which they were first seen.

    PyTorch keeps one Python object for each storage as long as the storage lives, so a weak reference to that object
    tells its end (torch/csrc/StorageMethods.cpp, "PyObject preservation").

    Args:
        ended: called with a storage's number when its last owner has let it go.
    """

    def __init__(self, ended: Callable[[Number], None]) -> None:
        self._ended = ended
        self._alive: dict[int, tuple[Number, int, weakref.ref[Any]]] = {}  # by address of the storage's C++ object
        self._next = 0

    def see(self, tensor: Tensor) -> Number | None:
        """A number for the tensor's storage if it is new; None if it is known or has no bytes."""
        storage = tensor.untyped_storage()
        key = identity(storage)
        if key in self._alive or not storage.nbytes():
            return None
        return self._begin(key, storage)

    def number(self, tensor: Tensor) -> Number | None:
        """The number of the tensor's storage; None if it was never seen."""
        found = self._alive.get(identity(tensor.untyped_storage()))
        return None if found is None else found[0]

    def changed(self, storage: torch.UntypedStorage) -> Number | None:
        """A storage that may have other bytes than before: its life ends, and another begins if any bytes are left.

        Returns:
            the number of the new life, None if there is none.
        """
        key, size = identity(storage), storage.nbytes()
        known = self._alive.get(key)
        if known is not None:
            if known[1] == size:
                return None
            del self._alive[key]
            self._ended(known[0])
        return self._begin(key, storage) if size else None

    def _begin(self, key: int, storage: torch.UntypedStorage) -> Number:
        number = self._next
        self._next += 1

        def end(_: object) -> None:
            del self._alive[key]
            self._ended(number)

        self._alive[key] = (number, storage.nbytes(), weakref.ref(storage, end))
        return number


@contextmanager
def watching_resizes(
    changed: Callable[[torch.UntypedStorage], None], run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
) -> Iterator[None]:
    """Calls `changed` after each `storage.resize_()` inside, which is no operator: FSDP2 frees its buffers so.

    Args:
        changed: told of the storage.
        run: called with what resizes and its arguments, calls it, and gives what it gives.
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
