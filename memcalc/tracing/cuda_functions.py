"""Emulation of a CUDA device for Python code without a GPU: fake CPU tensors that report the device "cuda".

Fake tensors on "cuda" need a CUDA build of PyTorch as soon as backward runs, so these are on "cpu" for PyTorch's C++
and on "cuda" for all Python code. Tensors that Python puts on the CPU (Adam's step counts) are real: they are small,
and their values can be read. Offloaded tensors are fake too (host.py). Functions of PyTorch that differ on CUDA are
replaced here: attention, dropout, RMSNorm and autocast; kernels that differ are in cuda_kernels.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from memcalc.recorder.storages import holds_tensors
from memcalc.step.host import HOST
from memcalc.tracing.attention import attention
from memcalc.tracing.autocast import Autocast
from memcalc.tracing.device_reads import OF_DATA, READS, numbers_in, without_reads, zero_for
from memcalc.tracing.host import OffloadedTensors, on_host
from memcalc.tracing.norms import rms_norm
from memcalc.tracing.values import Values

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


def on_device(value: Any) -> bool:
    """Return whether a tensor is on the emulated device."""
    value = _below_vmap(value)
    if isinstance(value, FakeTensor):
        device = value.fake_device
        return device.type != "meta" and device != HOST  # a module built on meta gets its memory later
    part = getattr(value, "_local_tensor", None)
    return holds_tensors(value) if part is None else on_device(part)


def _below_vmap(value: Any) -> Any:
    """Return the tensor below the wrappers of torch.func.vmap, in which transformers computes masks."""
    while isinstance(value, Tensor) and is_functorch_wrapped_tensor(value):
        value = get_unwrapped(value)
    return value


def shown_device(tensor_class: type[Tensor]) -> property:
    """Return the attribute `device` of a class of tensors, as Python code should see it."""
    original: Any = tensor_class.device

    def device(tensor: Tensor) -> torch.device:
        # PyTorch's own code below the dispatcher runs with torch functions disabled and must see the CPU.
        enabled = torch._C._is_torch_function_enabled()  # noqa: SLF001 -- no public name
        return CUDA if enabled and on_device(tensor) else cast("torch.device", original.__get__(tensor))

    return property(device)


class CudaFunctions(TorchFunctionMode):
    """Mode around a run on fake tensors: Python functions behave as on CUDA.

    `readbacks` counts how often the run read a data-dependent value; it got zero.

    Args:
        capability: compute capability of the GPU.
        values: known values of the device's tensors.
    """

    def __init__(self, capability: tuple[int, int], values: Values) -> None:
        super().__init__()
        self._values = values
        self.autocast = Autocast(on_device)
        self.host = OffloadedTensors()
        self.readbacks = 0
        self.placing = False  # whether a function is running that was asked to create its tensor on the device
        self._steered: dict[Any, Callable[..., Any]] = {
            **STEERED,
            functional.scaled_dot_product_attention: partial(attention, capability),
        }

    @contextmanager
    def entered(self) -> Iterator[CudaFunctions]:
        """Enter the mode, make autocast available, and let fake tensors report the emulated device."""
        engine = torch.autograd._engine_run_backward  # type: ignore[attr-defined] # noqa: SLF001 -- no public name

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            with self:  # a mode is off while one of its functions runs, but recomputation runs Python functions too
                return engine(*args, **kwargs)

        with (
            self.autocast.available(),
            mock.patch.object(FakeTensor, "device", shown_device(FakeTensor)),
            mock.patch.object(torch.autograd, "_engine_run_backward", run_backward),
            mock.patch.object(torch.autograd.graph, "save_on_cpu", self.host.save_on_cpu(self)),
            mock.patch.object(torch.utils, "swap_tensors", partial(_take_over, torch.utils.swap_tensors)),
            self,
        ):
            yield self

    def __torch_function__(  # noqa: D105
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in SAME or (function in ANSWERS and not on_device(args[0])):
            return function(*args, **kwargs)
        if (answer := ANSWERS.get(function)) or ((answer := self.host.answers.get(function)) and on_host(args[0])):
            return answer(args[0])
        if self.host.is_fake and function is torch.empty and kwargs.get("pin_memory"):
            return self.host.page_locked(*args, **kwargs)
        if self.host.is_fake and function is Tensor.cpu and on_device(args[0]):
            return self.host.copied_back(args[0], kwargs)
        if function in READS:
            return self._read(function, args, kwargs)
        if function is Tensor.new_tensor:  # it uses the tensor's dtype and device only
            kwargs = {"dtype": args[0].dtype, "device": CUDA if on_device(args[0]) else None} | kwargs
            function, args = torch.tensor, args[1:]
        if function in OF_DATA and args and isinstance(args[0], (tuple, list)):
            args = (numbers_in(args[0], lambda fake: self._read(Tensor.tolist, (fake,), {})), *args[1:])
        if function is Tensor.to and len(args) > 1 and on_device(args[1]) and not on_device(args[0]):
            args = (args[0], CUDA, args[1].dtype, *args[2:])  # the device and the dtype of another tensor
        device = _device(function, args, kwargs)
        if device is not None:
            return self._placed(function, args, kwargs, device)
        if not any(_holds_fake(value) for value in (*args, *kwargs.values())):
            with _disable_current_modes():
                return function(*args, **kwargs)
        args, read = without_reads(function, args, on_device)
        self.readbacks += read
        name = getattr(function, "__name__", "")
        if torch.is_autocast_enabled("cuda"):
            args, kwargs = self.autocast.arguments(name, args, kwargs)
        steered = self._steered.get(function)
        return function(*args, **kwargs) if steered is None else steered(*args, **kwargs)

    def _placed(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Any:
        """Run a call that names a device."""
        if device.type not in ("cuda", "cpu"):  # meta: no memory on either side
            with _disable_current_modes():
                return function(*args, **kwargs)
        there = HOST if device == HOST else CPU
        args = tuple(there if _is_device(value) else value for value in args)
        kwargs = {name: there if name == "device" else value for name, value in kwargs.items()}
        moved = args[0] if args and isinstance(args[0], Tensor) and function in MOVES else None
        if function is Tensor.cuda:
            function, args, kwargs = Tensor.to, (args[0], CPU), {}
        if device.type == "cuda":
            if moved is not None and not on_device(moved):
                return self._uploaded(moved, function, args, kwargs)
            self.placing = True
            try:
                return function(*args, **kwargs)
            finally:
                self.placing = False
        if there is HOST:
            self.host.is_fake = True
            return function(*args, **kwargs)
        if self.host.is_fake and moved is not None and isinstance(moved, FakeTensor):
            return self.host.copied_back(moved, kwargs)
        if moved is not None and on_device(moved):
            return self._fetched(moved)
        with _disable_current_modes():
            return function(*args, **kwargs)

    def _uploaded(self, tensor: Tensor, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Return a host tensor's copy on the device."""
        if on_host(tensor):
            return torch.empty_like(tensor, device=CPU)
        with _disable_current_modes():
            there = (
                function(tensor.to("meta"), *args[1:], **{**kwargs, "device": torch.device("meta")})
                if function is not Tensor.to
                else tensor.to("meta")
            )
        dtype = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)), there.dtype)
        copy = torch.empty_strided(there.shape, there.stride(), dtype=dtype, device=CPU)
        self._values.learn(copy, tensor)
        return copy.requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else copy

    def _read(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return a device value that the host reads: the value if known, else zero."""
        if not (on_device(args[0]) or on_host(args[0])):
            with _disable_current_modes():
                return function(*args, **kwargs)
        known = [self._values.of(value) if isinstance(value, Tensor) else value for value in args]
        if any(value is None for value in known):
            self.readbacks += 1
            return zero_for(function, args, kwargs)
        with _disable_current_modes():
            return function(*(value.clone() if isinstance(value, Tensor) else value for value in known), **kwargs)

    def _fetched(self, tensor: Tensor) -> Tensor:
        """Return a device tensor's copy on the host: its values if known, else zeros."""
        known = self._values.of(tensor)
        with _disable_current_modes():
            if known is not None:
                return known.clone()
            self.readbacks += 1
            return torch.zeros(tensor.shape, dtype=tensor.dtype)


def _device(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """Return the device that a call names; None if it names none."""
    if function is Tensor.cuda:
        return CUDA
    named = kwargs.get("device")
    if named is None and function in MOVES and len(args) > 1:
        named = next((value for value in args[1:] if _is_device(value)), None)
    return torch.device(named) if named is not None else None


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device) or (isinstance(value, str) and value.split(":")[0] in ("cuda", "cpu"))


def _holds_fake(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_holds_fake(item) for item in value)
    if isinstance(value, dict):
        return any(_holds_fake(item) for item in value.values())
    value = _below_vmap(value)
    return isinstance(value, FakeTensor) or holds_tensors(value)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: A002 -- PyTorch's signature
    """Return CUDA's dropout, which saves one byte per element:

    aten/src/ATen/native/Dropout.cpp, is_fused_kernel_acceptable.
    """
    if inplace or not 0 < p < 1 or not training or not input.numel():
        return functional.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


def _softmax(
    input: Tensor,  # noqa: A002 -- PyTorch's signature
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return softmax; CUDA's kernel reads fp16 and writes fp32 (native/SoftMax.cpp), while the CPU's needs a copy."""
    if input.dtype == torch.float16 and dtype == torch.float32 and dim is not None:
        return torch._softmax(input, dim, True)  # noqa: SLF001 -- half_to_float
    return functional.softmax(input, dim, _stacklevel, dtype)


def _cross_entropy(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002 -- PyTorch's signature
    """Return cross-entropy. The autocast lists have nll_loss only, so log-softmax keeps the input's dtype.

    Its result is then cast to fp32.
    Source: torch 2.13, aten/src/ATen/native/LossNLL.cpp, cross_entropy_loss_symint: it sets the dtype of log_softmax.
    """
    plain = not args and not target.is_floating_point() and not kwargs.get("label_smoothing")
    if not (torch.is_autocast_enabled("cuda") and plain and input.dtype in (torch.bfloat16, torch.float16)):
        return functional.cross_entropy(input, target, *args, **kwargs)
    scores = torch.log_softmax(input, 0 if input.dim() == 1 else 1, dtype=input.dtype)
    rest = {name: value for name, value in kwargs.items() if name != "label_smoothing"}
    return functional.nll_loss(scores.float(), target, **rest)


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """Return one_hot; with given classes CUDA's reads no value, while the CPU's does (native/Onehot.cpp)."""
    if num_classes <= 0:
        return functional.one_hot(tensor, num_classes)
    return tensor.new_zeros((*tensor.shape, num_classes), dtype=torch.long).scatter_(-1, tensor.unsqueeze(-1), 1)


def _answer(name: str) -> Any:
    """Return the function behind `tensor.<name>`."""
    return getattr(Tensor, name).__get__


def _take_over(swap: Callable[[Tensor, Tensor], None], parameter: Tensor, converted: Tensor) -> None:
    """Replace a parameter as `module.to(...)` does (torch 2.13, nn/modules/module.py, _apply).

    PyTorch swaps fake tensors, which fails if there are weak references to them, such as a recorder's.
    """
    if torch._has_compatible_shallow_copy_type(parameter, converted):  # noqa: SLF001 -- as nn.Module does
        parameter.data = converted
    else:
        swap(parameter, converted)


# The results of these functions depend on a tensor's shape and history only: most calls of a step.
SAME = frozenset(
    {
        *map(_answer, ("dtype", "grad", "grad_fn", "is_leaf", "is_sparse", "layout", "ndim", "requires_grad", "shape")),
        vars(Tensor.__base__)["grad"].__set__,
        *(Tensor.dim, Tensor.numel, Tensor.size, Tensor.stride, Tensor.is_floating_point, Tensor.is_contiguous),
        *(Tensor.storage_offset, Tensor.untyped_storage, torch.is_complex, torch.is_floating_point),
    }
)
MOVES = frozenset({Tensor.to, Tensor.cuda, Tensor.cpu, torch.as_tensor, torch.asarray})
ANSWERS: dict[Any, Callable[[Tensor], Any]] = {
    _answer("device"): lambda _: CUDA,
    _answer("is_cuda"): lambda _: True,
    _answer("is_cpu"): lambda _: False,
    Tensor.get_device: lambda _: 0,
}
STEERED: dict[Any, Callable[..., Any]] = {
    functional.dropout: _dropout,
    torch.dropout: _dropout,
    functional.cross_entropy: _cross_entropy,
    functional.one_hot: _one_hot,
    functional.softmax: _softmax,
    functional.rms_norm: rms_norm,
    torch.rms_norm: rms_norm,
}
