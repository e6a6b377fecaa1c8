"""What operators make of tensors of given shapes, remembered: a step does the same to every layer, and again each step.

PyTorch's fake tensors remember too, but pay for every case that there is (symbolic sizes, sparse tensors, constants)
on every call, most of a trace's time. Here only the plain case is known: fake tensors with numbers in, and out of it
new tensors, views, or the arguments themselves. Everything else is PyTorch's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from memcalc.recorder.storages import identity

Key = tuple[Hashable, ...]
Run = Callable[[], Any]

# What else an argument can be, and be known by its value.
PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
NEVER = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


class Made(NamedTuple):
    """One output.

    Args:
        shape: of the tensor, with its strides, and its offset into the storage in elements.
        stride: likewise.
        offset: likewise.
        dtype: of the elements.
        device: that the tensor says it is on; "meta" has no memory.
        source: which of the tensor arguments it is a view of; None: new memory.
        itself: it is that argument, not a view of it.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    source: int | None
    itself: bool

    @classmethod
    def of(cls, output: FakeTensor, given: list[FakeTensor]) -> Made:
        """An output beside the tensors that were given."""
        itself = next((i for i, tensor in enumerate(given) if tensor is output), None)
        storage = identity(output.untyped_storage())
        alike = (i for i, tensor in enumerate(given) if identity(tensor.untyped_storage()) == storage)
        source = next(alike, None) if itself is None else itself
        shape, stride, offset = tuple(output.shape), output.stride(), int(output.storage_offset())
        return cls(shape, stride, offset, output.dtype, output.fake_device, source, itself is not None)


class Known(NamedTuple):
    """All outputs of an operator: one, a list or tuple of them, or none at all."""

    kind: type | None
    made: tuple[Made | None, ...]


class KnownOutputs:
    """Runs operators, those that it knows by heart."""

    def __init__(self) -> None:
        self._known: dict[Key, Known | None] = {}

    def run(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Run) -> Any:
        """The operator's outputs.

        Args:
            operator: an operator of PyTorch.
            args: its arguments.
            kwargs: likewise.
            run: makes its outputs, where they are not known.
        """
        given: list[FakeTensor] = []
        parts: list[Hashable] = [operator, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        plain = _add(args, parts, given) and (not kwargs or _add_named(kwargs, parts, given))
        if not plain or not given:
            return run()
        key = tuple(parts)
        try:
            known = self._known[key]
        except KeyError:
            output = run()
            self._known[key] = _known(operator, given, output)
            return output
        return run() if known is None else _again(known, given)


def _add(values: Any, parts: list[Hashable], given: list[FakeTensor]) -> bool:
    """Appends what is to be known of arguments; False where one is not plain."""
    for value in values:
        kind = type(value)
        if kind in PLAIN:
            parts.append((kind, value))  # 1, 1.0 and True are equal
        elif issubclass(kind, FakeTensor):
            if value.constant is not None:
                return False
            parts.append((value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device))
            given.append(value)
        elif kind is list or kind is tuple:
            parts.append(len(value))
            if not _add(value, parts, given):
                return False
        else:
            return False
    return True


def _add_named(kwargs: Mapping[str, Any], parts: list[Hashable], given: list[FakeTensor]) -> bool:
    parts.append(tuple(kwargs))
    return _add(kwargs.values(), parts, given)


def _known(operator: Any, given: list[FakeTensor], output: Any) -> Known | None:
    """What to remember; None where it is not plain."""
    if operator.namespace != "aten" or not NEVER.isdisjoint(operator.tags):
        return None
    if output is None:
        return Known(None, ())
    several = type(output) in (list, tuple)
    made: list[Made | None] = []
    fresh: set[int] = set()  # storages
    for each in output if several else (output,):
        if each is None:
            made.append(None)
            continue
        if not isinstance(each, FakeTensor) or each.constant is not None or each.requires_grad or each.is_conj():
            return None
        one = Made.of(each, given)
        made.append(one)
        if one.source is None:
            storage = each.untyped_storage()
            if identity(storage) in fresh or storage.nbytes() != _dense(each):
                return None
            fresh.add(identity(storage))
        elif one.itself and torch.Tag.inplace_view in operator.tags:
            return None  # resize_, set_, t_ and their like: an argument is something else afterwards
    return Known(type(output) if several else Tensor, tuple(made))


def _dense(tensor: Tensor) -> int:
    """Bytes of the storage that a new tensor of these strides gets."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if not tensor.storage_offset() else -1


def _again(known: Known, given: list[FakeTensor]) -> Any:
    if known.kind is None:
        return None
    mode = given[0].fake_mode
    outputs = [None if made is None else _make(made, given, mode) for made in known.made]
    return outputs[0] if known.kind is Tensor else known.kind(outputs)


def _make(made: Made, given: list[FakeTensor], mode: FakeTensorMode) -> FakeTensor:
    shape, stride, offset, dtype, device, source, itself = made
    if source is not None and itself:
        return given[source]
    with torch._C._DisableTorchDispatch():  # noqa: SLF001 -- no public name
        bare = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        if source is not None:
            bare.set_(given[source].untyped_storage(), offset, shape, stride)
    return FakeTensor(mode, bare, device)
