"""Cache of operators' outputs by the shapes of their inputs: layers and steps repeat the same operators.

PyTorch's fake tensors cache too, but check every special case (symbolic sizes, sparse tensors, constants) on every
call, which takes most of a trace's time. This cache covers the plain case only: inputs are fake tensors and numbers;
outputs are new tensors, views, the inputs themselves, or numbers. PyTorch handles everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from memcalc.tracing.meta_kernels import of_meta_kernel
from memcalc.tracing.operator_outputs import OperatorOutput, OperatorOutputs

aten = torch.ops.aten

Key = tuple[Hashable, ...]
Run = Callable[[], Any]

# Other types of arguments, identified by value.
PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})

# They return the tensor that they fill, for any fill value; PyTorch would import much of itself for that.
FILLS = frozenset({aten.normal_.default, aten.uniform_.default, aten.fill_.Scalar, aten.zero_.default})

# They take one number per tensor, which changes each step (Adam's bias corrections) and affects no size.
SCALARS = frozenset(
    getattr(aten, f"_foreach_{name}").ScalarList for name in ("addcdiv", "addcdiv_", "addcmul_", "div", "div_", "mul_")
)


class KnownOutputs:
    """Runs operators, from the cache if their outputs are known."""

    def __init__(self) -> None:
        self._known: dict[Key, OperatorOutputs | None] = {}
        self._fakes = Fakes()

    def run(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Run) -> Any:
        """Return the operator's outputs.

        Args:
            operator: an operator of PyTorch.
            args: its arguments.
            kwargs: its keyword arguments.
            run: computes its outputs if they are not cached.
        """
        given: list[FakeTensor] = []
        parts: list[Hashable] = [operator, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        named = args if operator not in SCALARS else args[:-1]
        if not (_add(named, parts, given) and (not kwargs or _add_named(kwargs, parts, given))):
            return run()
        if operator in FILLS and given[0].is_floating_point():
            return given[0]
        key = tuple(parts)
        if key not in self._known:
            known = of_meta_kernel(operator, args, kwargs, given)
            if known is None:
                output = run()
                self._known[key] = _of_output(operator, given, output)
                return output
            self._known[key] = known
        known = self._known[key]
        return run() if known is None else self._again(known, given)

    def _again(self, known: OperatorOutputs, given: list[FakeTensor]) -> Any:
        if known.container is None:
            return None
        mode = given[0].fake_mode if given else _mode()
        outputs = [
            self._make(output, given, mode, known.device) if type(output) is OperatorOutput else output
            for output in known.results
        ]
        return outputs[0] if known.container is Tensor else known.container(outputs)

    def _make(
        self, output: OperatorOutput, given: list[FakeTensor], mode: FakeTensorMode, device: torch.device
    ) -> FakeTensor:
        shape, stride, offset, dtype, source, itself = output
        if source is None:
            return self._fakes.new(mode, shape, stride, dtype, device)
        return given[source] if itself else self._fakes.view(given[source], shape, stride, offset, dtype)


def _mode() -> FakeTensorMode:
    mode = active_fake_mode()
    assert mode is not None, "operators without tensors are known only where fake tensors are made"
    return mode


def _of_output(operator: Any, given: list[FakeTensor], output: Any) -> OperatorOutputs | None:
    """Return the outputs of PyTorch's fake tensors in cacheable form; None if they cannot be cached."""
    outputs = output if isinstance(output, (list, tuple)) else [output]
    fakes = [each for each in outputs if isinstance(each, Tensor)]
    devices = {each.fake_device for each in (*given, *fakes) if isinstance(each, FakeTensor)}
    plain = all(isinstance(each, FakeTensor) and each.constant is None for each in fakes)
    return OperatorOutputs.of(operator, given, output, devices.pop()) if plain and len(devices) == 1 else None


def _add(values: Any, parts: list[Hashable], given: list[FakeTensor]) -> bool:
    """Append the cache key of some arguments, and collect their tensors; False if one is not plain."""
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
