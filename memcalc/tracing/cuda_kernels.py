"""Differences between CUDA kernels and CPU kernels: outputs, and memory that they allocate internally."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException

from memcalc.ledger.component import Component
from memcalc.recorder.kernels import Hidden, Kernels, tensors
from memcalc.spec.hardware.gpus import GpuSpec
from memcalc.spec.hardware.kernels import capability, multiprocessors
from memcalc.tracing.cuda_workspaces import WORKSPACES
from memcalc.tracing.data_dependent import SELECTING, Selections
from memcalc.tracing.host import on_host
from memcalc.tracing.output_cache import KnownOutputs
from memcalc.tracing.streams import Streams
from memcalc.tracing.values import Values
from memcalc.workspaces.linear_algebra import cublas_workspace

aten = torch.ops.aten

GROUPED = aten._grouped_mm.default  # noqa: SLF001 -- an operator's name

# A number that becomes a tensor inside an operator: it stays on the host, and kernels receive it as an argument.
CONSTANT = aten.lift_fresh.default

# Matmuls that cuBLAS computes.
PRODUCTS = frozenset(
    getattr(aten, name) for name in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "mv", "addmv", "dot")
)

# Operators of which the device allocates only some outputs, or in another order: positions.
MADE: dict[Any, tuple[int, ...]] = {
    aten.native_dropout: (1, 0),  # the mask comes first (native/cuda/Dropout.cu)
    aten._linalg_svd: (0, 2, 1),  # noqa: SLF001 -- the singular values come last (native/BatchLinearAlgebra.cpp)
    # Without a captured CUDA graph the seed and the offset stay on the host (cuda/attention.cu).
    aten._scaled_dot_product_efficient_attention: (0, 1),  # noqa: SLF001 -- an operator's name
}


# Returns the collective's output once it is complete (torch/csrc/distributed/c10d/Functional.cpp).
WAIT = getattr(getattr(torch.ops._c10d_functional, "wait_tensor", None), "default", None)  # noqa: SLF001 -- an operator's name

READ = torch.ops.aten._local_scalar_dense.default  # noqa: SLF001 -- an operator's name


class FakeKernels(Kernels):
    """Kernels on tensors without values: operators with data-dependent sizes select as `Selections` assumes.

    `readbacks` counts how often PyTorch's own C++ code read a value (an index, a check); it got zero.
    """

    def __init__(self) -> None:
        self.values = Values()
        self.selections = Selections(self.values)
        self.readbacks = 0
        self._known = KnownOutputs()

    def run(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the operator's outputs; data-dependent sizes assume evenly distributed values."""
        if operator is WAIT:  # returns its argument: a fake output would be a copy
            return args[0]
        if operator is READ and (known := self.values.number(args[0])) is not None:
            return known
        if operator.overloadpacket in SELECTING:
            output = self.values.selected(operator, args, kwargs)
            if output is not NotImplemented:
                return output
        output = self.selections.output(operator, args, kwargs)
        if output is NotImplemented:
            try:
                output = self._known.run(operator, args, kwargs, partial(super().run, operator, args, kwargs))
            except DataDependentOutputException:
                if operator is not READ:
                    raise
                self.readbacks += 1
                dtype = args[0].dtype
                return False if dtype == torch.bool else 0.0 if dtype.is_floating_point else 0
        self.selections.note(operator, args, kwargs, output)
        self.values.note(operator, args, kwargs, output)
        return output


class CudaKernels(FakeKernels):
    """The kernels of one GPU.

    Args:
        gpu: the GPU.
        streams: has the current stream; None: there is only one stream.
        placing: returns whether a Python function is running that creates its tensor on the device.
    """

    def __init__(
        self, gpu: GpuSpec, streams: Streams | None = None, placing: Callable[[], bool] = lambda: True
    ) -> None:
        super().__init__()
        self._placing = placing
        self._streams = streams
        self.multiprocessors = multiprocessors(gpu)
        release = tuple(int(part) for part in torch.__version__.split(".")[:2])
        config = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
        self._workspace = cublas_workspace(capability(gpu), (release[0], release[1]), config)
        self._threads: set[bool] = set()  # with a cuBLAS workspace: forward's (False), autograd's (True)

    @property
    def stream(self) -> int:
        """The CUDA stream of allocations."""
        return 0 if self._streams is None else self._streams.number

    def run(self, operator: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the outputs of CUDA's kernel."""
        with torch._C.DisableTorchFunction():  # noqa: SLF001 -- PyTorch's own code below must see its own devices
            if operator is aten.histc.default:  # CUDA's takes integers (native/cuda/SummaryOps.cu), the CPU's does not
                return args[0].new_empty((args[1] if len(args) > 1 else kwargs.get("bins", 100),))
            if operator is GROUPED and args[0].dtype != torch.bfloat16:
                # CUDA's kernel also accepts other dtypes, group by group (native/cuda/GroupedBlas.cpp); its shapes are
                # the same.
                in_bf16 = (x.to(torch.bfloat16) if isinstance(x, Tensor) and x.is_floating_point() else x for x in args)
                return operator(*in_bf16, **kwargs).to(args[0].dtype)
            output = super().run(operator, args, kwargs)
            if operator is aten.native_layer_norm.default and args[0].dtype != torch.float64:
                # The CPU stores the statistics in the input's dtype, CUDA in fp32 (native/cuda/layer_norm_kernel.cu).
                normed, mean, deviation = output
                return normed, mean.to(torch.float32), deviation.to(torch.float32)
        return output

    def outputs(self, operator: Any, output: Any) -> Iterable[Tensor]:
        """Return the tensors that the device allocates, in its order."""
        if operator is CONSTANT and not self._placing():
            return ()
        made = MADE.get(operator.overloadpacket)
        if made is None:
            return super().outputs(operator, output)
        return [output[position] for position in made]

    def hidden(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Sequence[Hidden]:
        """Return the kernel's internal blocks."""
        packet = operator.overloadpacket
        if any(on_host(tensor) for tensor in islice(tensors(args), 1)):
            return [Hidden((size, -size)) for size in staged(packet, args)]
        if packet in PRODUCTS:
            return self._product()
        rule = WORKSPACES.get(packet)
        if rule is None:
            return ()
        with torch._C.DisableTorchFunction():  # noqa: SLF001 -- as above
            return rule(self.multiprocessors, args, kwargs, output)

    def _product(self) -> Sequence[Hidden]:
        """Return the workspace of a thread's cuBLAS handle at its first matmul; forward and autograd have one each."""
        in_autograd = torch._C._current_autograd_node() is not None  # noqa: SLF001 -- no public name
        if in_autograd in self._threads or not self._workspace:
            return ()
        self._threads.add(in_autograd)
        return (Hidden((self._workspace,), component=Component.LIBRARY_WORKSPACE),)


def staged(packet: Any, args: tuple[Any, ...]) -> Iterator[int]:
    """Yield the device memory of a copy to the host: a contiguous temporary, if the source is not contiguous.

    Source: torch 2.13 aten/src/ATen/native/cuda/Copy.cu, copy_requires_temporaries, copy_kernel_cuda.
    """
    if packet is torch.ops.aten.copy_ and not on_host(args[1]) and not args[1].is_contiguous():
        yield args[1].numel() * args[1].element_size()
