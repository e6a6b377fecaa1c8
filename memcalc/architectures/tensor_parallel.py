"""Tensor-parallel communication in a block's tape, outside the linear layers themselves.

Megatron-LM's linear layers gather and scatter inside (`operators.linear`), so this class adds nothing for them.
PyTorch's DTensor communicates between modules, by the plan of step/reference/tensor_parallel.py, which is torchtitan's
(torchtitan/models/llama3/infra/parallelize.py, apply_tp).
"""

from __future__ import annotations

from memcalc.architectures.structure import BlockStructure
from memcalc.operators import Operators
from memcalc.programs.tape import Shape, Tensor


class TensorParallelOps:
    """Linear layers and collectives of tensor parallelism.

    Args:
        ops: the operators, with their tape.
        c: the structure.
    """

    def __init__(self, ops: Operators, c: BlockStructure) -> None:
        self.ops = ops
        self.c = c
        self.stream = c.sharding.tokens
        self.gathers = c.sharding.dtensor and c.sharding.sequence_parallel

    def module_input(self, x: Tensor, name: str) -> Tensor:
        """Return the input of attention, MLP or LM head: all tokens under sequence parallelism (PrepareModuleInput)."""
        if not self.gathers:
            return x
        return self.ops.all_gathered(x, f"{name} input", (x.shape[0], "s", *x.shape[2:]), view=not self.c.batched)

    def column(self, x: Tensor, module: str, weight: Shape, out: Shape, *, bias: bool, tied: bool = False) -> Tensor:
        """A linear layer sharded along its outputs (ColwiseParallel)."""
        if self.c.sharding.dtensor and not self.gathers:
            x = self.ops.replicated(x, f"{module} input")
        return self.ops.linear(x, module, weight, out, bias=bias, tied=tied)

    def row(self, x: Tensor, module: str, weight: Shape, *, bias: bool) -> Tensor:
        """A linear layer sharded along its inputs (RowwiseParallel); its output is summed across ranks."""
        if not self.c.sharding.dtensor:
            return self.ops.linear(x, module, weight, ("b", self.stream, "d"), bias=bias, row=True)
        out = self.summed(self.ops.linear(x, module, weight, ("b", "s", "d"), bias=bias), f"{module} output")
        self.returned(x)  # the hook that sums runs inside nn.Module.__call__, which references the arguments
        return out

    def returned(self, *named: Tensor) -> None:
        """Mark a function's end: its variables, and arguments replaced by hooks, were live until here."""
        self.ops.tape.still_referenced(*named)

    def summed(self, partial: Tensor, name: str) -> Tensor:
        """The sum of partial results across ranks: all of it, or the rank's tokens."""
        if not self.c.sharding.dtensor:
            return partial
        if not self.gathers:
            return self.ops.all_reduced(partial, name)
        part = (partial.shape[0], self.stream, *partial.shape[2:])
        return self.ops.reduce_scattered(partial, name, part, view=not self.c.batched)
