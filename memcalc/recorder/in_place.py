"""What backward does in place as long as nobody watches.

While a dispatch mode is entered, PyTorch takes every tensor for a subclass (at::isTensorSubclassLike) and spares it
what it does to plain ones: autograd adds two gradients of one tensor out of place, where it adds into the first if
nothing else refers to that (torch/csrc/autograd/input_buffer.cpp, accumulate and can_accumulate_inplace), and backward
formulas write into a copy of their fresh zeros (torch/csrc/autograd/FunctionsManual.cpp). So the recorder's run would
hold blocks that an unwatched one does not, unless such an operator, when it comes by, is run in place after all.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memcalc.recorder.dense import is_dense

References = tuple[int, int, int]
"""To a tensor, to its Python object, and to its storage."""

aten = torch.ops.aten


class InPlace(NamedTuple):
    """What an operator is without a mode.

    Args:
        operator: that one.
        more: arguments that it has beyond those of the other.
        nodes: how the backward nodes are called whose formula does it, to zeros of its own; none: autograd's engine
            does, to a gradient.
    """

    operator: Any
    more: tuple[Any, ...] = ()
    nodes: tuple[str, ...] = ()


IN_PLACE: dict[Any, InPlace] = {
    aten.add.Tensor: InPlace(aten.add_.Tensor),
    # index_backward, which leaves out the check of the indices: unsafe = True
    aten.index_put.default: InPlace(aten._index_put_impl_.default, (True,), ("IndexBackward",)),
    aten.index_add.default: InPlace(aten.index_add_.default, (), ("IndexSelectBackward",)),
    aten.scatter_add.default: InPlace(aten.scatter_add_.default, (), ("GatherBackward",)),
    # value_selecting_reduction_backward
    aten.scatter.src: InPlace(aten.scatter_.src, (), ("Max", "Min", "Topk", "Sort", "Kthvalue", "Median", "Mode")),
}

# Backward formulas in C++ that add on their own, out of place (torch/csrc/autograd/FunctionsManual.cpp).
ADDING = ("VarMeanBackward", "StdMeanBackward")

# Python's function that the engine was called by; above the operators of a thread of its own there is none.
ENGINE = "_engine_run_backward"


def in_place(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], last: References) -> InPlace | None:
    """What backward would do in place without a dispatch mode; None where it would do what it does.

    Args:
        operator: one of `IN_PLACE`.
        args: its arguments, as they came to `__torch_dispatch__` of the mode, whose caller's frame is looked at.
        kwargs: likewise.
        last: `references_of_last()`.
    """
    if kwargs or torch.is_grad_enabled() or torch._C._current_graph_task_id() < 0:  # noqa: SLF001 -- no public name
        return None
    caller = sys._getframe(1).f_back  # noqa: SLF001 -- likewise
    if caller is not None and caller.f_code.co_name != ENGINE:
        return None  # a hook, a backward written in Python, a tensor made of tensors
    instead = IN_PLACE[operator]
    node = type(torch._C._current_autograd_node()).__name__  # noqa: SLF001 -- likewise
    if instead.nodes:
        return instead if node.startswith(instead.nodes) else None
    engines = not node.startswith(ADDING) and _references(args) == last and is_dense(args[0].shape, args[0].stride())
    return instead if engines else None


def _references(args: tuple[Any, ...]) -> References:
    """Those to the first argument, our own among them."""
    tensor: Tensor = args[0]
    storage = tensor.untyped_storage()
    return tensor._use_count(), sys.getrefcount(tensor), torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined] # noqa: SLF001 -- no public name


@cache
def references_of_last() -> References:
    """Those to a gradient that only the engine refers to, as they show in a dispatch mode: versions of PyTorch differ.

    To be called where no operator is running: it runs a backward of its own.
    """
    seen: list[References] = []

    class Looking(TorchDispatchMode):  # type: ignore[no-untyped-call]
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # as the recorder: the guard against compilation would import the compiler, for seconds

        def __torch_dispatch__(self, operator: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            if operator is aten.add.Tensor:
                seen.append(_references(args))
            return operator(*args, **(kwargs or {}))

    with torch.inference_mode(mode=False), torch.enable_grad():
        used_twice = torch.ones(2, requires_grad=True) * 2
        loss = (used_twice.sin() * used_twice.cos()).sum()
    with Looking():  # type: ignore[no-untyped-call]
        loss.backward()  # type: ignore[no-untyped-call]
    return seen[0]
