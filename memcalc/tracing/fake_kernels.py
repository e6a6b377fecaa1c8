"""Kernels on fake tensors of any device: data-dependent sizes, and known values."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

from memcalc.recorder.kernels import Kernels
from memcalc.tracing.data_dependent import SELECTING, Selections
from memcalc.tracing.output_cache import KnownOutputs
from memcalc.tracing.values import Values

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
