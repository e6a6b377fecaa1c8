"""Megatron-Core's own modules: linear layers, functions that torch.compile fuses, and masked attention scores.

Source: Megatron-LM core_v0.16.1 core/tensor_parallel/layers.py, core/fusions/, core/transformer/.
"""

from __future__ import annotations

from memcalc.operators.base import DERIVATIVES
from memcalc.operators.transformer_engine import TransformerEngine
from memcalc.programs import operator_workspaces
from memcalc.programs.tape import NEW, SAME, BackwardMemory, ForwardMemory, Node, Shape, Tensor

LOCAL = "Megatron-LM core_v0.16.1 core/"
BIAS_ROWS = 128  # rows that a compiled sum over all tokens first sums into one


class MegatronLocal(TransformerEngine):
    """Operators of Megatron-Core's own modules."""

    def projected(self, x: Tensor, module: str, weight: str, out: Shape, *, bias: bool) -> Tensor:
        """y = x W^T, with W sharded along its outputs, then + b in a second tensor; saves x.

        Backward computes the gradients of x, W and b (LinearWithGradAccumulationAndAsyncCommunication).
        """
        y = self.column_parallel(x, module, weight, out, bias=bias)
        node = self.tape.nodes[-1]
        node.backward = node.backward._replace(python_function=True)
        if bias:
            product = self.tape.store(f"{module} product", out, x.dtype, f"{LOCAL}tensor_parallel/layers.py")
            node.forward = node.forward._replace(also=(*node.forward.also, product), first=(product,))
            (staging, _), _ = self.column_sum(module, "bias", out[:-1], out[-1:])
            node.backward = node.backward._replace(temporaries=(*node.backward.temporaries, staging))
        return y

    def summed_output(self, x: Tensor, module: str, out: Shape) -> Tensor:
        """y = x W^T, with W sharded along its inputs; its bias is added by the next operator."""
        y = self.row_parallel(x, module, out, bias=False)
        node = self.tape.nodes[-1]
        node.backward = node.backward._replace(python_function=True)
        return y

    def biased_activation(self, x: Tensor, name: str, out: Shape, module: str, *, bias: bool) -> Tensor:
        """An activation of x plus the bias of `module`, if any, in one compiled kernel; saves x.

        The gradient of the sum is that of both, so the engine sums it over all tokens for the bias
        (core/fusions/fused_bias_gelu.py, GeLUFunction; fused_bias_swiglu.py, BiasSwiGLUFunction).
        """
        y = self.tape.new(name, out, x.dtype, f"{LOCAL}fusions: saves its input")
        node = Node(
            name, (x,), (y,), (x.storage,), (NEW,), kernel="activation", backward=BackwardMemory(python_function=True)
        )
        if bias:
            gradient = self.parameter_gradient(module, "bias", x.shape[-1:], self.parameters)
            node.parameters = (gradient,)
            sums = ((gradient, 1), *self.column_sum(module, "bias", x.shape[:-1], x.shape[-1:]))
            node.backward = node.backward._replace(summed=(gradient,), summed_later=sums)
        self.tape.record(node)
        return y

    def bias_dropout_add(
        self, x: Tensor, residual: Tensor, name: str, rate: float, module: str, *, bias: bool
    ) -> Tensor:
        """residual + dropout(x + bias of `module`) in one compiled kernel; saves the dropout's mask.

        Given a bias, which requires a gradient, forward makes the mask also where no graph is recorded, and it is live
        until the layer returns. The kernel of backward sums the bias's gradient over blocks of BIAS_ROWS tokens, then
        over the blocks (core/fusions/fused_bias_dropout.py).
        """
        citation = f"{LOCAL}fusions/fused_bias_dropout.py"
        y = self.tape.new(name, residual.shape, residual.dtype, citation)
        mask = (self.tape.store(f"{name} mask", x.shape, "bool", citation),) if rate else ()
        node = Node(
            name,
            (x, residual),
            (y,),
            mask,
            (NEW if rate else SAME, SAME),
            forward=ForwardMemory(also=mask, first=mask, for_graph=() if bias else mask),
            kernel=f"{'biased ' if bias else ''}{'dropout' if rate else 'sum'}",
            backward=BackwardMemory(python_function=True),
        )
        if bias:
            rule = operator_workspaces.named(
                operator_workspaces.sums_of_blocks, rows=x.shape[:-1], width=x.shape[-1], block=BIAS_ROWS
            )
            sums = self.tape.store(f"{name} bias sums", (), "uint8", citation, rule=rule)
            node.backward = node.backward._replace(between=((sums, 1),))
            node.parameters = (self.parameter_gradient(module, "bias", x.shape[-1:], self.parameters),)
        self.tape.record(node)
        return y

    def masked_view(self, x: Tensor, mask: Tensor, name: str) -> Tensor:
        """x.view(...).masked_fill_(mask, number); saves the mask.

        Backward of an operator that overwrites a view (torch 2.13 torch/csrc/autograd/functions/tensor.cpp,
        CopySlices::apply): the view's gradient is copied, that copy again, and a clone of it masked into a third.
        """
        view = Tensor(x.storage, x.shape, x.dtype)
        y = Tensor(x.storage, x.shape, x.dtype)
        names = ("clone of the gradient", "masked clone")
        clones = tuple(self.tape.store(f"{name}: {each}", x.shape, x.dtype, DERIVATIVES) for each in names)
        self.tape.record(
            Node(name, (x, mask), (view,), (mask.storage,), (NEW, None), backward=BackwardMemory(temporaries=clones))
        )
        self.tape.record(Node(f"{name} by head", (view,), (y,), (), (NEW,)))
        return y

    def zeroed_rows(self, x: Tensor, name: str) -> Tensor:
        """x[mask] = 0 in place, for tokens outside the rank's vocabulary; saves the mask. Backward copies the gradient.

        Source: core/tensor_parallel/layers.py, VocabParallelEmbedding.
        """
        mask = self.tape.store(f"{name}: mask", x.shape[:-1], "bool", f"{LOCAL}tensor_parallel/layers.py")
        y = Tensor(x.storage, x.shape, x.dtype)
        self.tape.record(Node(name, (x,), (y,), (mask,), (NEW,), forward=ForwardMemory(also=(mask,))))
        return y
