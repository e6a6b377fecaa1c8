"""What all operators share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from memcalc.estimation import workspaces
from memcalc.estimation.adapters import Adapters
from memcalc.estimation.tape import NEW, Node, Shape, Tape, Tensor
from memcalc.ledger.component import Component

TIED_SUM = "sum with the tied head's gradient"  # how such a sum is shown
DERIVATIVES = "torch 2.13 tools/autograd/derivatives.yaml"


class Base:
    """What all operators share: the tape, the dtypes, and autocast.

    Args:
        tape: where the operators are recorded.
        compute: dtype of forward and backward, "bf16", "fp16" or "fp32".
        parameters: dtype of the weights.
        autocast: whether torch.autocast is on, in the compute dtype.
        adapters: what trains where the model's own parameters are frozen; None: these train.
    """

    def __init__(
        self, tape: Tape, compute: str, parameters: str, autocast: bool, adapters: Adapters | None = None
    ) -> None:
        self.adapters = adapters
        self.tape = tape
        self.compute = compute
        self.parameters = parameters
        self.autocast = autocast
        self.fp8, self.fp8_columns = "none", False  # of Transformer Engine's matrices
        self.fuses_weight_gradients = True  # of Megatron-Core's: whether they add to the main gradients themselves
        self.fp32_modules: tuple[str, ...] = ()  # whose parameters are in fp32, whatever those of others are in

    @contextmanager
    def in_fp32(self) -> Iterator[None]:
        """Where parameters are in fp32, and autocast is off."""
        before = self.autocast, self.parameters
        self.autocast, self.parameters = False, "fp32"
        try:
            yield
        finally:
            self.autocast, self.parameters = before

    def trains(self, module: str) -> bool:
        """Whether a module's own parameters get gradients."""
        return self.adapters is None or module.rpartition(".")[2] in self.adapters.saved

    def cast(self, x: Tensor, dtype: str, name: str | None = None) -> Tensor:
        """x in another dtype: a copy, and its gradient one in the old dtype. Nothing where x has it already."""
        if x.dtype == dtype:
            return x
        name = name or f"{self.tape.storages[x.storage].name} in {dtype}"
        y = self.tape.new(name, x.shape, dtype, "aten::_to_copy", grad=x.grad)
        self.tape.record(Node(name, (x,), (y,), (), (NEW if x.grad else None,)))
        return y

    def cast_weight(self, module: str, tensor: str, shape: Shape, gradient: int | None) -> Tensor:
        """The cast of an fp32 leaf is cached until autocast's region ends; its backward makes the fp32 gradient.

        A frozen one has no gradient (None). Only casts of fp32 leaves that need a gradient are cached: others are made
        at each use, and the operator that reads a cast saves it.
        """
        citation = "ATen autocast_mode.cpp, cached_cast"
        if gradient is None:
            frozen = self.tape.new(f"{module}.{tensor} in {self.compute}", shape, self.compute, citation, grad=False)
            self.tape.record(Node(f"{module}.{tensor} cast", (), (frozen,), (), ()))
            return frozen
        if self.parameters != "fp32":
            made = self.tape.new(f"{module}.{tensor} in {self.compute}", shape, self.compute, citation)
            self.tape.record(Node(f"{module}.{tensor} cast", (), (made,), (), (), parameters=(gradient,)))
            return made
        name = f"{module}.{tensor} in {self.compute} (autocast cache)"
        storage = self.tape.store(name, shape, self.compute, citation, component=Component.TEMPORARIES)
        cast = Tensor(storage, shape, self.compute)
        self.tape.region.add(storage)
        self.tape.record(Node(f"{module}.{tensor} cast", (), (cast,), (), (), parameters=(gradient,)))
        return cast

    def autocast_input(self, x: Tensor, module: str) -> Tensor:
        """Each use of an activation casts it anew: only casts of leaves are cached."""
        return self.cast(x, self.compute, f"{module} input in {self.compute}") if self.autocast else x

    def sorted_indices(self, module: str, tokens: Shape, rows: str) -> int:
        """A storage for what an embedding's backward makes before its gradient."""
        rule = workspaces.named(workspaces.sorted_indices, tokens=tokens, rows=rows)
        return self.tape.store(f"{module} sorted indices", (), "uint8", "ATen native/cuda/Embedding.cu", rule=rule)

    def parameter_gradient(self, module: str, tensor: str, shape: Shape, dtype: str) -> int:
        """A storage for the gradient of a parameter, named as its row in the parameter table."""
        return self.tape.store(
            f"{module}.{tensor}",
            shape,
            dtype,
            "autograd: torch/csrc/autograd/functions/accumulate_grad.h",
            component=Component.GRADIENTS,
            parameter=f"{module}.{tensor}",
        )


def wider(a: str, b: str) -> str:
    """The dtype of a result of two: fp32 if either is, and of bf16 and fp16 (c10/core/ScalarType.cpp)."""
    return "fp32" if "fp32" in (a, b) or {"bf16", "fp16"} == {a, b} else a
