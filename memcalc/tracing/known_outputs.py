"""What operators make of tensors of given shapes, remembered: a step does the same to every layer, and again each step.

PyTorch's fake tensors remember too, but pay for every case that there is (symbolic sizes, sparse tensors, constants)
on every call, most of a trace's time. Here only the plain case is known: fake tensors and numbers in, and out of it
new tensors, views, the arguments themselves, or numbers. Everything else is PyTorch's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from memcalc.tracing.fakes import Fakes
from memcalc.tracing.made import Known, Made
from memcalc.tracing.meta_kernels import of_meta_kernel

aten = torch.ops.aten

Key = tuple[Hashable, ...]
Run = Callable[[], Any]

# What else an argument can be, and be known by its value.
PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})

# They give the tensor that they fill, whatever with; PyTorch loads a good part of itself to say so.
FILLS = frozenset({aten.normal_.default, aten.uniform_.default, aten.fill_.Scalar, aten.zero_.default})

# Numbers for each tensor, which change with the step (Adam's corrections) and make nothing larger.
SCALARS = frozenset(
    getattr(aten, f"_foreach_{name}").ScalarList for name in ("addcdiv", "addcdiv_", "addcmul_", "div", "div_", "mul_")
)


class KnownOutputs:
    """Runs operators, those that it knows by heart."""

    def __init__(self) -> None:
        self._known: dict[Key, Known | None] = {}
        self._fakes = Fakes()

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

    def _again(self, known: Known, given: list[FakeTensor]) -> Any:
        if known.kind is None:
            return None
        mode = given[0].fake_mode if given else _mode()
        outputs = [self._make(made, given, mode, known.device) if type(made) is Made else made for made in known.made]
        return outputs[0] if known.kind is Tensor else known.kind(outputs)

    def _make(self, made: Made, given: list[FakeTensor], mode: FakeTensorMode, device: torch.device) -> FakeTensor:
        shape, stride, offset, dtype, source, itself = made
        if source is None:
            return self._fakes.new(mode, shape, stride, dtype, device)
        return given[source] if itself else self._fakes.view(given[source], shape, stride, offset, dtype)


def _mode() -> FakeTensorMode:
    mode = active_fake_mode()
    assert mode is not None, "operators without tensors are known only where fake tensors are made"
    return mode


def _of_output(operator: Any, given: list[FakeTensor], output: Any) -> Known | None:
    """What PyTorch's fake tensors made, as far as it can be made without them."""
    outputs = output if isinstance(output, (list, tuple)) else [output]
    fakes = [each for each in outputs if isinstance(each, Tensor)]
    devices = {each.fake_device for each in (*given, *fakes) if isinstance(each, FakeTensor)}
    plain = all(isinstance(each, FakeTensor) and each.constant is None for each in fakes)
    return Known.of(operator, given, output, devices.pop()) if plain and len(devices) == 1 else None


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
