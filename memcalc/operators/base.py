"""Base class of all operators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from memcalc.layout.adapters import Adapters
from memcalc.ledger.component import Component
from memcalc.programs import operator_workspaces
from memcalc.programs.tape import NEW, Node, Shape, Tape, Tensor
from memcalc.spec.fp32_modules import in_fp32

if TYPE_CHECKING:
    from memcalc.operators.fake_quantized_linear import FakeQuantization
    from memcalc.operators.float8 import Float8

TIED_SUM = "sum with the tied head's gradient"  # name of this sum in rows
DERIVATIVES = "torch 2.13 tools/autograd/derivatives.yaml"


class Dtypes(NamedTuple):
    """Dtypes of modules, and what autocast does to them."""

    compute: str  # dtype of forward and backward, "bf16", "fp16" or "fp32"
    parameters: str  # dtype of the weights
    autocast: bool = False  # whether torch.autocast is enabled, with the compute dtype
    caches_casts: bool = True  # whether autocast caches casts of leaves
    fp32_modules: tuple[str, ...] = ()  # modules with fp32 parameters, for any parameter dtype

    @property
    def embedded(self) -> str:
        """The dtype of the embedding's output."""
        return "fp32" if in_fp32("embed_tokens", self.fp32_modules) else self.parameters


class LinearLayers(NamedTuple):
    """The classes of linear layers that a library or an engine puts in place of nn.Linear."""

    adapters: Adapters | None = None  # adapters of a frozen base model; None: the model's own parameters train
    replaced: bool = False  # whether DeepSpeed's stage 3 runs its own linear layers (runtime/zero/linear.py)
    float8: Float8 | None = None  # options of torchao's FP8 linear layers
    fake_quantization: FakeQuantization | None = None  # options of torchao's fake-quantized linear layers
    fp8: str = "none"  # scaling recipe of Transformer Engine's FP8 GEMMs
    fp8_columns: bool = False  # whether Transformer Engine makes a second FP8 copy for backward GEMMs


NN_LINEAR = LinearLayers()


class Base:
    """Base class of all operators: the tape, the dtypes, and autocast.

    Args:
        tape: records the operators.
        dtypes: the dtypes of the modules.
        linears: the classes of the linear layers.
    """

    def __init__(self, tape: Tape, dtypes: Dtypes, linears: LinearLayers = NN_LINEAR) -> None:
        self.tape = tape
        self.compute, self.parameters, self.autocast, self.caches_casts, self.fp32_modules = dtypes
        self.adapters, self.replaced_linears, self.float8 = linears.adapters, linears.replaced, linears.float8
        self.fake_quantization = linears.fake_quantization
        self.fp8, self.fp8_columns = linears.fp8, linears.fp8_columns
        self.fuses_weight_gradients = True  # whether Megatron-Core's GEMMs add to the main gradients
        self.cached: dict[Tensor, Tensor] = {}  # casts of leaves that autocast has cached

    @contextmanager
    def in_fp32(self) -> Iterator[None]:
        """Context in which parameters are in fp32 and autocast is off."""
        before = self.autocast, self.parameters
        self.autocast, self.parameters = False, "fp32"
        try:
            yield
        finally:
            self.autocast, self.parameters = before

    def result(
        self,
        name: str,
        shape: Shape,
        dtype: str,
        inputs: tuple[Tensor, ...],
        saved: tuple[int, ...],
        gradients: tuple[str | None, ...],
        *,
        citation: str = DERIVATIVES,
        grad: bool = True,
    ) -> Tensor:
        """Record an operator with one new tensor as its result (see `Node`), and return that."""
        y = self.tape.new(name, shape, dtype, citation, grad=grad)
        self.tape.record(Node(name, inputs, (y,), saved, gradients))
        return y

    def trains(self, module: str) -> bool:
        """Return whether a module's own parameters get gradients."""
        return self.adapters is None or module.rpartition(".")[2] in self.adapters.saved

    def cast(self, x: Tensor, dtype: str, name: str | None = None) -> Tensor:
        """Cast x to another dtype: a copy, and its gradient a copy in the old dtype. No operator if x has the dtype."""
        if x.dtype == dtype:
            return x
        name = name or f"{self.tape.storages[x.storage].name} in {dtype}"
        y = self.tape.new(name, x.shape, dtype, "aten::_to_copy", grad=x.grad)
        self.tape.record(Node(name, (x,), (y,), (), (NEW if x.grad else None,)))
        return y

    def cast_weight(self, module: str, tensor: str, shape: Shape, gradient: int | None) -> Tensor:
        """Cast a weight to the compute dtype; autocast caches casts of fp32 leaves until its region ends.

        Backward produces the fp32 gradient; a frozen weight has none (None). Only casts of fp32 leaves that require a
        gradient are cached. Other weights are cast at each use, and the operator that reads a cast saves it.
        """
        citation = "ATen autocast_mode.cpp, cached_cast"
        if gradient is None:
            frozen = self.tape.new(f"{module}.{tensor} in {self.compute}", shape, self.compute, citation, grad=False)
            self.tape.record(Node(f"{module}.{tensor} cast", (), (frozen,), (), ()))
            return frozen
        if self.parameters != "fp32" or not self.caches_casts:
            made = self.tape.new(f"{module}.{tensor} in {self.compute}", shape, self.compute, citation)
            self.tape.record(Node(f"{module}.{tensor} cast", (), (made,), (), (), parameters=(gradient,)))
            return made
        name = f"{module}.{tensor} in {self.compute} (autocast cache)"
        storage = self.tape.store(name, shape, self.compute, citation, component=Component.TEMPORARIES)
        cast = Tensor(storage, shape, self.compute)
        self.tape.live.region.add(storage)
        self.tape.record(Node(f"{module}.{tensor} cast", (), (cast,), (), (), parameters=(gradient,)))
        return cast

    def autocast_input(self, x: Tensor, module: str) -> Tensor:
        """Cast an activation under autocast: at each use, or once if it is a leaf, until autocast's region ends."""
        if not self.autocast:
            return x
        if x not in self.cached:
            y = self.cast(x, self.compute, f"{module} input in {self.compute}")
            if not x.leaf or y is x or not self.caches_casts:
                return y
            self.cached[x] = y
            self.tape.live.region.add(y.storage)
        return self.cached[x]

    def sorted_indices(self, module: str, tokens: Shape, rows: str) -> int:
        """Add a storage for what an embedding's backward allocates before its gradient."""
        rule = operator_workspaces.named(operator_workspaces.sorted_indices, tokens=tokens, rows=rows)
        return self.tape.store(f"{module} sorted indices", (), "uint8", "ATen native/cuda/Embedding.cu", rule=rule)

    def column_sum(self, module: str, tensor: str, rows: Shape, columns: Shape) -> tuple[tuple[int, int], ...]:
        """Add a storage for the buffer of a sum over all tokens; return its allocation and its free."""
        rule = operator_workspaces.named(operator_workspaces.column_sum, rows=rows, columns=columns)
        buffer = self.tape.store(f"{module} {tensor} sum", (), "uint8", "ATen native/cuda/Reduce.cuh", rule=rule)
        return (buffer, 1), (buffer, -1)

    def parameter_gradient(self, module: str, tensor: str, shape: Shape, dtype: str) -> int:
        """Add a storage for the gradient of a parameter, named as its row in the parameter table."""
        return self.tape.store(
            f"{module}.{tensor}",
            shape,
            dtype,
            "autograd: torch/csrc/autograd/functions/accumulate_grad.h",
            component=Component.GRADIENTS,
            parameter=f"{module}.{tensor}",
        )


def wider(a: str, b: str) -> str:
    """Return the dtype of a result of two tensors: fp32 if either is fp32, or for bf16 with fp16.

    Source: c10/core/ScalarType.cpp.
    """
    return "fp32" if "fp32" in (a, b) or {"bf16", "fp16"} == {a, b} else a
