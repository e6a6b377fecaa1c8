"""Operators that route tokens to experts by index: top-k, sorting, row copies, and grouped GEMMs."""

from __future__ import annotations

from memcalc.ledger.component import Component
from memcalc.operators.base import DERIVATIVES, wider
from memcalc.operators.lora_linear import LoraLinear
from memcalc.programs import operator_workspaces
from memcalc.programs.tape import ALIAS, CAST, NEW, REDUCED, BackwardMemory, ForwardMemory, Node, Shape, Tensor

INDEXING = "torch 2.13 ATen native/cuda/Indexing.cu, index_put_with_sort_kernel"
GROUPED = "torch 2.13 derivatives.yaml, _grouped_mm"


class Routing(LoraLinear):
    """Selection of experts, and the operators that follow it."""

    def flattened(self, x: Tensor, name: str) -> Tensor:
        """View all tokens as one matrix, where the gradients of its readers are accumulated."""
        y = Tensor(x.storage, x.shape, x.dtype, flat=True)
        self.tape.record(Node(name, (x,), (y,), (), (ALIAS,)))
        return y

    def top_k(self, x: Tensor, out: Shape, name: str) -> tuple[Tensor, Tensor]:
        """The largest values along the last axis and their int64 indices; saves the indices."""
        y = self.tape.new(name, out, x.dtype, DERIVATIVES)
        indices = Tensor(self.tape.store(f"{name} indices", out, "int64", DERIVATIVES), out, "int64", grad=False)
        self.tape.record(
            Node(name, (x,), (y,), (indices.storage,), (NEW,), forward=ForwardMemory(also=(indices.storage,)))
        )
        return y, indices

    def fp32_linear(self, x: Tensor, module: str, weight: Shape, out: Shape) -> Tensor:
        """linear(x.float(), weight.float()) on a matrix of tokens; saves both copies, each for the other's gradient.

        Autocast chooses the dtype of the matmul itself; fp32 weights are not copied.
        """
        tape, trains = self.tape, self.trains(module)
        x = self.cast(x, "fp32", f"{module} input in fp32")
        if self.parameters == "fp32":
            return self.linear(x, module, weight, out, bias=False)
        # A copy of a parameter is no activation: a temporary, as in the trace.
        copied = tape.store(
            f"{module}.weight in fp32", weight, "fp32", "aten::_to_copy", component=Component.TEMPORARIES
        )
        wide = Tensor(copied, weight, "fp32", grad=trains)
        gradients = (self.parameter_gradient(module, "weight", weight, self.parameters),) if trains else ()
        tape.record(Node(f"{module}.weight cast", (), (wide,), (), (), parameters=gradients))
        y = tape.new(f"{module} output", out, "fp32", "torch.nn.functional.linear")
        seen = Tensor(wide.storage, weight, "fp32", strided=True)
        saved = (*((x,) if trains else ()), *((seen,) if x.grad else ()))
        kinds = (NEW if trains else None, NEW if x.grad else None)
        node = Node(
            module,
            (wide, x),
            (y,),
            tuple(t.storage for t in saved),
            kinds,
            variables=saved,
            module=module,
            multiplies=True,
        )
        tape.record(node)
        return y

    def filled(self, x: Tensor, mask: Tensor, name: str) -> Tensor:
        """x with a number where a mask is true (masked_fill); saves the mask."""
        return self.result(name, x.shape, x.dtype, (x,), (mask.storage,), (NEW,))

    def overwritten(self, x: Tensor, index: Tensor, name: str) -> Tensor:
        """x with a number at some indices of its last axis (scatter); saves the indices."""
        return self.result(name, x.shape, x.dtype, (x,), (index.storage,), (NEW,))

    def placed(self, x: Tensor, index: Tensor, out: Shape, name: str) -> Tensor:
        """A tensor with x at some indices of the last axis (scatter_); saves the indices."""
        return self.result(name, out, x.dtype, (x,), (index.storage,), (NEW,))

    def sparse_multiplier(self, scores: Tensor, weight: Tensor, chosen: Tensor, given: Tensor, name: str) -> Tensor:
        """The scaled weight of a selected expert; its gradient reaches only the scores, by the probabilities `given`.

        Source: transformers 5.23 modeling_phimoe.py, PhimoeMultiplier.
        """
        tape, citation = self.tape, "transformers 5.23 modeling_phimoe.py, PhimoeMultiplier"
        y = tape.new(name, weight.shape, weight.dtype, citation)
        scaled, negated = (
            tape.store(f"{name}: {step}", weight.shape, weight.dtype, citation)
            for step in ("scaled gradient", "negated gradient")
        )
        saved = (weight.storage, chosen.storage, given.storage)
        kind, steps = NEW if scores.dtype == given.dtype else CAST, ((scaled, 1), (negated, 1))
        node = Node(
            name,
            (scores,),
            (y,),
            saved,
            (kind,),
            backward=BackwardMemory(prepares=steps, between=((negated, -1),), python_function=True),
        )
        tape.record(node)
        return y

    def total(self, x: Tensor, name: str) -> Tensor:
        """The sum over the last axis, see `sum_of_copies`; saves nothing. Its gradient is expanded, as a view."""
        y = self.tape.new(name, x.shape[:-1], "fp32" if self.autocast else x.dtype, DERIVATIVES)
        self.tape.record(Node(name, (x,), (y,), (), (ALIAS if x.dtype == y.dtype else NEW,)))
        return y

    def divide_in_place(self, x: Tensor, by: Tensor, name: str) -> Tensor:
        """x /= by, broadcast along the last axis; saves the divisor and a copy of the original x.

        Backward first computes the divisor's gradient, -gradient * ((x / by) / by), each step a tensor as large as x
        (torch 2.13 torch/csrc/autograd/FunctionsManual.cpp, div_tensor_other_grad).
        """
        tape = self.tape
        before = tape.store(f"{name} before division", x.shape, x.dtype, "autograd: a clone, as x is overwritten")
        return self._divided(Tensor(x.storage, x.shape, x.dtype), x, by, name, (by.storage, before), (before,))

    def divide(self, x: Tensor, by: Tensor, name: str) -> Tensor:
        """x / by, broadcast along the last axis, in a new tensor; saves both."""
        y = self.tape.new(name, x.shape, x.dtype, DERIVATIVES)
        return self._divided(y, x, by, name, (by.storage, x.storage), ())

    def _divided(
        self, y: Tensor, x: Tensor, by: Tensor, name: str, saved: tuple[int, ...], buffers: tuple[int, ...]
    ) -> Tensor:
        citation = "torch 2.13 FunctionsManual.cpp, div_tensor_other_grad"
        dtype = wider(x.dtype, by.dtype)
        factors = (("quotient", dtype), ("its quotient", dtype), ("negated gradient", y.dtype))
        steps = tuple(self.tape.store(f"{name}: {step}", x.shape, of, citation) for step, of in factors)
        node = Node(
            name,
            (by, x),
            (y,),
            saved,
            (REDUCED, NEW if x.dtype == dtype else CAST),
            backward=BackwardMemory(prepares=tuple((step, 1) for step in steps), frees_early=steps),
            forward=ForwardMemory(also=buffers),
        )
        self.tape.record(node)
        return y

    def largest(self, x: Tensor, out: Shape, name: str) -> Tensor:
        """The indices of the largest values along the last axis (topk); nothing reads the values."""
        values = self.tape.store(f"{name}: their values", out, x.dtype, "aten::topk")
        chosen = Tensor(self.tape.store(name, out, "int64", "aten::topk"), out, "int64", grad=False)
        self.tape.record(Node(name, (x,), (chosen,), (), (None,), forward=ForwardMemory(first=(values,))))
        return chosen

    def sorted_order(self, like: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """torch.sort of all indices in one row: the sorted indices, and their original positions."""
        tape = self.tape
        rule = operator_workspaces.named(operator_workspaces.sort_row, length=like.shape)
        scratch = tape.store(f"{name} scratch", (), "uint8", "ATen native/cuda/Sort.cu", rule=rule)
        values, order = (
            Tensor(tape.store(each, like.shape, "int64", "aten::sort"), like.shape, "int64", grad=False)
            for each in (f"{name}: sorted", name)
        )
        tape.record(Node(name, (like,), (values, order), (), (None,), forward=ForwardMemory(temporaries=(scratch,))))
        return values, order

    def rows_at(self, x: Tensor, index: Tensor, out: Shape, name: str, rows: Shape) -> Tensor:
        """x[index] along the first axis, with `rows` rows; saves the index. Backward adds into a tensor of zeros."""
        tape = self.tape
        y = tape.new(name, out, x.dtype, "aten::index")
        rule = operator_workspaces.named(operator_workspaces.add_rows, indices=index.shape, rows=rows)
        scratch = tape.store(f"{name}: sorted indices", (), "uint8", INDEXING, rule=rule)
        tape.record(
            Node(name, (x, index), (y,), (index.storage,), (NEW, None), backward=BackwardMemory(temporaries=(scratch,)))
        )
        return y

    def grouped_gemm(self, x: Tensor, offsets: Tensor, module: str, weight: Shape, out: Shape) -> Tensor:
        """Grouped GEMM: groups of rows times one weight each (torch.nn.functional.grouped_mm); saves x and group ends.

        Autocast has no rule for it, so x is cast to the weights' dtype. The weight gradient is computed first.
        """
        tape, trains = self.tape, self.trains(module)
        x = self.cast(x, self.parameters)
        y = tape.new(f"{module} output", out, x.dtype, GROUPED)
        parameters = (self.parameter_gradient(module, "weight", weight, self.parameters),) if trains else ()
        seen = Tensor(-1, weight, self.parameters, strided=True)  # transposed
        node = Node(
            module,
            (x,),
            (y,),
            (*((x.storage,) if trains else ()), offsets.storage),
            (NEW,),
            parameters=parameters,
            backward=BackwardMemory(parameters_first=True),
            keeps_weight=x.grad,
            variables=(*((x,) if trains else ()), *((seen,) if x.grad else ()), offsets),
            module=module,
        )
        tape.record(node, trains=trains)
        return y

    def weigh(self, x: Tensor, weights: Tensor, name: str, *, first: bool = False) -> Tensor:
        """x times one weight per row; saves both. The weights' gradient is first as large as x, then summed.

        Args:
            x: the rows.
            weights: the weights.
            name: name of the result.
            first: whether the weights are the first factor, with a gradient computed after that of x.
        """
        y = self.tape.new(name, x.shape, wider(x.dtype, weights.dtype), DERIVATIVES)
        of_x = NEW if x.dtype == y.dtype else CAST
        inputs, gradients = ((x, weights), (of_x, REDUCED)) if first else ((weights, x), (REDUCED, of_x))
        self.tape.record(Node(name, inputs, (y,), (x.storage, weights.storage), gradients))
        return y

    def sum_of_copies(self, x: Tensor, out: Shape, name: str) -> Tensor:
        """Sum the copies of each token; saves nothing. Backward repeats the gradient, since a view needs it contiguous.

        Autocast requests a sum in fp32, which reads x in its own dtype (ATen autocast_mode.cpp, fp32_set_opt_dtype).
        """
        return self.result(name, out, "fp32" if self.autocast else x.dtype, (x,), (), (NEW,), citation="aten::sum")
