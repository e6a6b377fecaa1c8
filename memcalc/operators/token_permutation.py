"""Operators of torchtitan's token dispatch: rows permuted with padding, restored, exchanged between ranks, and weighed.

Source: torchtitan 0.2.2 torchtitan/models/moe/utils.py (_permute, _unpermute) and moe.py.
"""

from __future__ import annotations

from memcalc.operators.routing import INDEXING, Routing
from memcalc.programs import operator_workspaces
from memcalc.programs.tape import ALIAS, NEW, BackwardMemory, ForwardMemory, Node, Shape, Tensor

UTILS = "torchtitan 0.2.2 torchtitan/models/moe/utils.py"
# ATen native/IndexingUtils.h, expandTensors: int32 indices are copied to int64 at each use.
EXPAND = "ATen native/TensorAdvancedIndexing.cpp, make_info"


class TokenPermutation(Routing):
    """Rows of tokens in the order of experts."""

    def with_empty_row(self, x: Tensor, out: Shape) -> Tensor:
        """x and a row of zeros below (vstack); the gradient of x is a view."""
        y = self.tape.new("token copies and an empty row", out, x.dtype, f"{UTILS}: _permute")
        self.tape.record(Node("token copies and an empty row", (x,), (y,), (), (ALIAS,)))
        return y

    def rows_at_int32(self, x: Tensor, index: Tensor, out: Shape, name: str) -> Tensor:
        """x[index] of int32 indices; saves the index. Backward adds into a tensor of zeros."""
        tape = self.tape
        y = tape.new(name, out, x.dtype, "aten::index")
        copied = self.table(f"{name}: int64 indices", index.shape, "int64", EXPAND, of=(index,))
        rule = operator_workspaces.named(operator_workspaces.add_rows, indices=index.shape, rows=x.shape[:1])
        scratch = tape.store(f"{name}: sorted indices", (), "uint8", INDEXING, rule=rule)
        again = tape.store(f"{name}: int64 indices for the gradient", index.shape, "int64", EXPAND)
        node = Node(
            name,
            (x, index),
            (y,),
            (index.storage,),
            (NEW, None),
            backward=BackwardMemory(temporaries=(again, scratch)),
        )
        tape.record(node)
        tape.still_referenced(copied)
        return y

    def rows_placed(self, x: Tensor, index: Tensor, out: Shape, name: str) -> Tensor:
        """A new tensor with x at some rows (`y[index] = x`); saves the index. The gradient is read at these rows."""
        tape = self.tape
        y = tape.new(name, out, x.dtype, "aten::index_put_")
        copies: tuple[int, ...] = ()
        before: tuple[tuple[int, int], ...] = ()
        if index.dtype == "int32":
            copies = (tape.store(f"{name}: int64 indices", index.shape, "int64", EXPAND),)
            again = tape.store(f"{name}: int64 indices for the gradient", index.shape, "int64", EXPAND)
            before = ((again, 1),)
        node = Node(
            name,
            (x,),
            (y,),
            (index.storage,),
            (NEW,),
            forward=ForwardMemory(temporaries=copies),
            backward=BackwardMemory(prepares=before, between=tuple((each, -1) for each, _ in before)),
        )
        tape.record(node)
        return y

    def without_last_row(self, x: Tensor, out: Shape, name: str) -> Tensor:
        """x[:-1], a view; its gradient is written into a tensor of zeros."""
        y = Tensor(x.storage, out, x.dtype)
        self.tape.record(Node(name, (x,), (y,), (), (NEW,)))
        return y

    def weighted_sum(self, weights: Tensor, x: Tensor, out: Shape, name: str) -> Tensor:
        """The sum of each token's rows times their weights (bmm); saves both. The gradient of x comes first."""
        return self.result(name, out, x.dtype, (x, weights), (x.storage, weights.storage), (NEW, NEW))

    def all_to_all(self, x: Tensor, out: Shape, name: str, module: str) -> Tensor:
        """Exchange rows with other ranks; the gradient goes back the same way.

        Args:
            x: the rows that the rank sends.
            out: axes of the rows that it receives.
            name: name of the result.
            module: the module with the parameters that are gathered before it.
        """
        y = self.tape.new(name, out, x.dtype, "torch 2.13 torch/distributed/_functional_collectives.py: all_to_all")
        self.tape.record(Node(name, (x,), (y,), (), (NEW,), module=module))
        return y

    def matmul_of_each(self, x: Tensor, offsets: Tensor, module: str, weight: Shape, out: Shape) -> Tensor:
        """A matmul for each expert, with its slice of the weight; saves x.

        Backward writes each slice's gradient into a tensor of zeros as large as the weight, and adds these.
        """
        y = self.grouped_gemm(x, offsets, module, weight, out)
        node = self.tape.nodes[-1]
        zeros = self.tape.store(f"{module}: gradient of a slice", weight, x.dtype, "aten::select_backward")
        node.backward = node.backward._replace(temporaries=(zeros,))
        return y

    def joined_rows(self, x: Tensor, out: Shape, name: str) -> Tensor:
        """Rows in a new tensor (cat); the gradients of its parts are views."""
        return self.result(name, out, x.dtype, (x,), (), (ALIAS,), citation="aten::cat")

    def row_total(self, x: Tensor, name: str) -> Tensor:
        """The sum over the last axis, which stays with size 1; saves nothing. Its gradient is expanded, as a view."""
        return self.result(name, x.shape[:-1], x.dtype, (x,), (), (ALIAS,))
