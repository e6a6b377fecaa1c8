"""Megatron-Core's operators for routed experts, and linear layers replicated across tensor-parallel ranks.

Sources: Megatron-LM core_r0.14 core/transformer/moe/{router,token_dispatcher,experts,moe_utils}.py; Transformer Engine
2.11 pytorch/module/grouped_linear.py, pytorch/permutation.py.
"""

from __future__ import annotations

from memcalc.operators.transformer_engine import TransformerEngine
from memcalc.programs.tape import NEW, BackwardMemory, ForwardMemory, Node, Shape, Tensor

PERMUTATION = "Transformer Engine 2.11 pytorch/permutation.py: saves row_id_map"
GROUPED = "Transformer Engine 2.11 pytorch/module/grouped_linear.py: saves inputmats"


class MegatronMoeOps(TransformerEngine):
    """Token permutation, grouped GEMM over experts, replicated linear layers."""

    def duplicated(self, x: Tensor, module: str, width: str, out: Shape, *, bias: bool, fused: bool = True) -> Tensor:
        """y = x W^T with the same W on every tensor-parallel rank; saves x.

        `fused`: whether the weight gradient is added to the main gradient in place; otherwise it is produced first.
        """
        citation = "Transformer Engine 2.11 pytorch/module/linear.py, parallel_mode duplicated"
        y = self.tape.new(f"{module} output", out, x.dtype, citation)
        tensors: list[tuple[str, Shape]] = [] if fused else [("weight", (width, x.shape[-1]))]
        tensors += [("bias", (width,))] if bias else []
        gradients = tuple(self.parameter_gradient(module, name, shape, self.parameters) for name, shape in tensors)
        self.tape.nodes.append(
            Node(module, (x,), (y,), (x.storage,), (NEW,), parameters=gradients, module=module, multiplies=True)
        )
        return y

    def permuted(self, x: Tensor, out: Shape, name: str, experts: str | None = None) -> Tensor:
        """Copy each token for each expert it is routed to; the operator that creates the row map (`experts`) saves it.

        Per token the map has two numbers per expert and one more (pytorch/triton/permutation.py: make_row_id_map). One
        kernel permutes the tokens and their weights; the same map restores their order.
        """
        y = self.tape.new(name, out, x.dtype, PERMUTATION)
        kept: tuple[int, ...] = ()
        if experts is not None:
            kept = (self.tape.store("row map of the experts", (*x.shape[:-1], f"2·{experts}+1"), "int32", PERMUTATION),)
        self.tape.nodes.append(Node(name, (x,), (y,), kept, (NEW,), forward=ForwardMemory(also=kept)))
        return y

    def summed_experts(self, x: Tensor, out: Shape, name: str) -> Tensor:
        """Sum the copies of each token, using the row map."""
        y = self.tape.new(name, out, x.dtype, PERMUTATION)
        self.tape.nodes.append(Node(name, (x,), (y,), (), (NEW,)))
        return y

    def regrouped(self, x: Tensor, out: Shape, name: str) -> Tensor:
        """Reorder rows into a new tensor, in forward and backward (sort_chunks_by_idxs)."""
        y = self.tape.new(name, out, x.dtype, PERMUTATION)
        self.tape.nodes.append(Node(name, (x,), (y,), (), (NEW,)))
        return y

    def grouped(self, x: Tensor, module: str, weight: Shape, out: Shape, *, bias: bool) -> Tensor:
        """Grouped GEMM, one weight per expert of the rank; saves x. Weight gradients are added to main gradients."""
        y = self.tape.new(f"{module} output", out, x.dtype, GROUPED)
        gradients = (self.parameter_gradient(module, "bias", weight, self.parameters),) if bias else ()
        kept, made = self._kept_input(x, module)
        self.tape.nodes.append(
            Node(
                module,
                (x,),
                (y,),
                kept,
                (NEW,),
                forward=ForwardMemory(also=kept if kept != (x.storage,) else (), temporaries=made),
                backward=BackwardMemory(temporaries=self._output_gradient(out, module)),
                parameters=gradients,
                module=module,
                multiplies=True,
            )
        )
        return y

    def weighted_glu(self, x: Tensor, weights: Tensor, name: str, out: Shape) -> Tensor:
        """act(gate) * up * router weight in one kernel; saves the tensor of gate and up, and the weights."""
        citation = "Megatron-LM core_r0.14 core/fusions/fused_bias_swiglu.py: WeightedSwiGLUFunction"
        y = self.tape.new(name, out, x.dtype, citation)
        self.tape.nodes.append(Node(name, (x, weights), (y,), (x.storage, weights.storage), (NEW, NEW)))
        return y
