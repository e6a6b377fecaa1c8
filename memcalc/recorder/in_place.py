"""Operations that backward does in place only without a dispatch mode.

While a dispatch mode is active, PyTorch treats every tensor as a subclass (at::isTensorSubclassLike) and avoids some
in-place operations. Autograd adds two gradients of one tensor out of place; without a mode it adds into the first if
nothing else refers to it (torch/csrc/autograd/input_buffer.cpp, accumulate and can_accumulate_inplace). Backward
formulas write into a copy of their fresh zeros (torch/csrc/autograd/FunctionsManual.cpp). The recorded run would
therefore allocate blocks that an unrecorded one does not, so the recorder runs these operators in place.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memcalc.recorder.storages import is_dense

References = tuple[int, int, int]
"""To a tensor, to its Python object, and to its storage."""

aten = torch.ops.aten


class InPlaceForm(NamedTuple):
    """The in-place form of an operator."""

    operator: Any  # the in-place operator
    more: tuple[Any, ...] = ()  # additional arguments that it needs
    # name prefixes of the backward nodes that apply it to their own zeros; (): autograd's engine applies it to a
    # gradient
    nodes: tuple[str, ...] = ()


IN_PLACE: dict[Any, InPlaceForm] = {
    aten.add.Tensor: InPlaceForm(aten.add_.Tensor),
    # index_backward skips the check of the indices: unsafe = True
    aten.index_put.default: InPlaceForm(aten._index_put_impl_.default, (True,), ("IndexBackward",)),
    aten.index_add.default: InPlaceForm(aten.index_add_.default, (), ("IndexSelectBackward",)),
    aten.scatter_add.default: InPlaceForm(aten.scatter_add_.default, (), ("GatherBackward",)),
    # value_selecting_reduction_backward
    aten.scatter.src: InPlaceForm(aten.scatter_.src, (), ("Max", "Min", "Topk", "Sort", "Kthvalue", "Median", "Mode")),
}

# Backward formulas in C++ that add out of place themselves (torch/csrc/autograd/FunctionsManual.cpp).
ADDING = ("VarMeanBackward", "StdMeanBackward")

# Python function that calls the engine; operators on the engine's own threads have no Python caller.
ENGINE = "_engine_run_backward"


def in_place(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], last: References) -> InPlaceForm | None:
    """Return the in-place form that backward uses without a dispatch mode; None if it uses the operator itself.

    Args:
        operator: an operator of `IN_PLACE`.
        args: its arguments, as passed to the mode's `__torch_dispatch__`; that function's caller is examined.
        kwargs: its keyword arguments.
        last: `references_of_last()`.
    """
    if kwargs or torch.is_grad_enabled() or torch._C._current_graph_task_id() < 0:  # noqa: SLF001 -- no public name
        return None
    caller = sys._getframe(1).f_back  # noqa: SLF001 -- as above
    if caller is not None and caller.f_code.co_name != ENGINE:
        return None  # a hook, a backward written in Python, or a tensor subclass
    instead = IN_PLACE[operator]
    node = type(torch._C._current_autograd_node()).__name__  # noqa: SLF001 -- as above
    if instead.nodes:
        return instead if node.startswith(instead.nodes) else None
    engines = not node.startswith(ADDING) and _references(args) == last and is_dense(args[0].shape, args[0].stride())
    return instead if engines else None


def _references(args: tuple[Any, ...]) -> References:
    """Return the counts of references to the first argument, including those of the recorder."""
    tensor: Tensor = args[0]
    storage = tensor.untyped_storage()
    return tensor._use_count(), sys.getrefcount(tensor), torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined] # noqa: SLF001 -- no public name


@cache
def references_of_last() -> References:
    """Return the reference counts, inside a dispatch mode, of a gradient that only the engine refers to.

    They depend on the version of PyTorch. Call this function while no operator is running: it runs a backward pass.
    """
    seen: list[References] = []

    class Looking(TorchDispatchMode):  # type: ignore[no-untyped-call]
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # as in the recorder: the guard would import the compiler, for seconds

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
