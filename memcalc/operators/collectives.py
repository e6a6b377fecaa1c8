"""Collectives of PyTorch's DTensor between operators, with their buffers.

Sources: torch 2.13 torch/distributed/_functional_collectives.py, which copies wherever the dimension is not the first;
torch/distributed/tensor/_redistribute.py, which calls it. The results are plain tensors: if an operator saves one, it
stays allocated, and is not gathered again in backward as in Megatron-LM.
"""

from __future__ import annotations

from memcalc.ledger.component import Component
from memcalc.operators.base import TIED_SUM, Base
from memcalc.programs import operator_workspaces
from memcalc.programs.tape import NEW, SAME, BackwardMemory, DeferredGradients, ForwardMemory, Node, Shape, Tensor

FUNCTIONAL = "torch 2.13 torch/distributed/_functional_collectives.py"


class Collectives(Base):
    """All-gather, reduce-scatter, all-reduce and slicing, forward and backward."""

    def all_gathered(self, x: Tensor, name: str, shape: Shape, *, view: bool) -> Tensor:
        """All-gather x along the sequence; backward reduce-scatters the gradients.

        The gradient of the gathered tensor is a DTensor; autograd sums two of them into a third tensor.

        Args:
            x: the rank's shard.
            name: name of the tensor.
            shape: its gathered axes.
            view: whether the gathered parts are already in order, as for a single sequence.
        """
        tape = self.tape
        source = f"{FUNCTIONAL}: all_gather_single, reduce_scatter_single"
        whole = tape.new(f"{name}, gathered", shape, x.dtype, source)
        whole.subclass = True
        arrives = () if view else (self._passing(f"{name}, received", shape, x.dtype),)
        leaves = self._passing(f"gradient of {name}, split for the reduction", shape, x.dtype)
        node = Node(
            f"{name} gathered",
            (x,),
            (whole,),
            (),
            (NEW,),
            forward=ForwardMemory(first=arrives),
            backward=BackwardMemory(prepares=((leaves, 1),), between=((leaves, -1),)),
        )
        tape.record(node)
        return whole

    def reduce_scattered(self, partial: Tensor, name: str, shape: Shape, *, view: bool) -> Tensor:
        """Reduce-scatter a partial sum; backward all-gathers the gradient.

        Args:
            partial: the rank's partial sum.
            name: name of the tensor.
            shape: axes of the rank's shard.
            view: as for `all_gathered`.
        """
        tape = self.tape
        part = tape.new(f"{name}, summed", shape, partial.dtype, f"{FUNCTIONAL}: reduce_scatter_single")
        leaves = self._passing(f"{name}, split for the reduction", partial.shape, partial.dtype)
        arrives = () if view else (self._passing(f"gradient of {name}, received", partial.shape, partial.dtype),)
        node = Node(
            f"{name} summed",
            (partial,),
            (part,),
            (),
            (NEW,),
            forward=ForwardMemory(first=(leaves,)),
            backward=BackwardMemory(
                prepares=tuple((index, 1) for index in arrives), between=tuple((index, -1) for index in arrives)
            ),
        )
        tape.record(node)
        return part

    def all_reduced(self, partial: Tensor, name: str) -> Tensor:
        """All-reduce into a new tensor; its gradient is that of the summands."""
        total = self.tape.new(f"{name}, summed", partial.shape, partial.dtype, f"{FUNCTIONAL}: all_reduce")
        self.tape.record(Node(f"{name} summed", (partial,), (total,), (), (SAME,)))
        return total

    def replicated(self, x: Tensor, name: str) -> Tensor:
        """Use a replicated x unchanged; its gradient is all-reduced into a new tensor."""
        seen = Tensor(x.storage, x.shape, x.dtype, x.grad)
        self.tape.record(Node(f"{name} on every rank", (x,), (seen,), (), (NEW,)))
        return seen

    def gathered_columns(self, part: Tensor, name: str, shape: Shape) -> Tensor:
        """All-gather columns, always copied into order; a rank copies its columns out of the gradient."""
        tape = self.tape
        whole = tape.new(f"{name}, gathered", shape, part.dtype, f"{FUNCTIONAL}: all_gather_single")
        arrives = self._passing(f"{name}, received", shape, part.dtype)
        tape.record(Node(f"{name} gathered", (part,), (whole,), (), (NEW,), forward=ForwardMemory(first=(arrives,))))
        return whole

    def split_rows(self, module: str, width: str, tokens: Shape, *, tied: bool, whole_gradient: bool) -> Tensor:
        """Look up rows of a vocabulary-parallel embedding; zeros for tokens outside the rank's V/t rows.

        Backward computes the gradient of the full embedding, then copies the rank's rows out of it
        (torch/distributed/tensor/_ops/_embedding_ops.py, embedding_dense_backward_strategy: an unsharded gradient).
        A tied LM head's gradient is added into a third tensor, as for any DTensor.

        Args:
            module: its name.
            width: axis of a row.
            tokens: axes of the indices.
            tied: whether the LM head shares the weight.
            whole_gradient: whether the unsharded gradient stays, without a copy of the rank's rows.
        """
        tape = self.tape
        y = tape.new(f"{module} output", (*tokens, width), self.parameters, "torch.nn.functional.embedding")
        rule = operator_workspaces.named(operator_workspaces.embedding_backward, tokens=tokens, rows="V", width=width)
        scratch = tape.store(f"{module} sums", (), "uint8", "ATen native/cuda/Embedding.cu", rule=rule)
        first = ((self.sorted_indices(module, tokens, "V"), 1),)
        source = "torch 2.13 torch/distributed/tensor/_ops/_embedding_ops.py"
        if whole_gradient:
            gradient = self.parameter_gradient(module, "weight", ("V", width), self.parameters)
            temporaries = (scratch,)
            node = Node(
                module,
                (),
                (y,),
                (),
                (),
                backward=BackwardMemory(prepares=first, temporaries=temporaries),
                parameters=(gradient,),
                module=module,
            )
            tape.record(node)
            return y
        whole = tape.store(f"{module} gradient of the whole embedding", ("V", width), self.parameters, source)
        tape.gradients.deferred.add(whole)
        gradient = self.parameter_gradient(module, "weight", ("V/t", width), self.parameters)
        sums: tuple[tuple[int, ...], ...] = ((gradient, whole),)
        drops: tuple[int, ...] = ()
        if tied:
            citation = "torch 2.13 autograd/input_buffer.cpp: gradients of subclasses are summed out of place"
            rows, total = (
                tape.store(f"{module} {name}", ("V/t", width), self.parameters, citation)
                for name in ("gradient before the sum", TIED_SUM)
            )
            sums, drops = ((rows,), (total, rows)), (total, whole)
            tape.gradients.tied_sum = total
            tape.gradients.arrives_summed = gradient
        node = Node(
            module,
            (),
            (y,),
            (),
            (),
            backward=BackwardMemory(prepares=first, temporaries=(scratch,)),
            parameters=(whole,),
            deferred=DeferredGradients(sums=sums, drops=drops, completes=() if tied else (gradient,)),
            module=module,
        )
        tape.record(node)
        return y

    def _passing(self, name: str, shape: Shape, dtype: str) -> int:
        return self.tape.store(name, shape, dtype, FUNCTIONAL, component=Component.COMMUNICATION_BUFFERS)
