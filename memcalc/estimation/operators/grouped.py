"""Megatron-Core's operators around routed experts, and matrices that every tensor-parallel rank holds whole.

Sources: Megatron-LM core_r0.14 core/transformer/moe/{router,token_dispatcher,experts,moe_utils}.py; Transformer Engine
2.11 pytorch/module/grouped_linear.py, pytorch/permutation.py.
"""

from __future__ import annotations

from memcalc.estimation.operators.transformer_engine import TransformerEngine
from memcalc.estimation.tape import NEW, Node, Shape, Tensor

PERMUTATION = "Transformer Engine 2.11 pytorch/permutation.py: saves row_id_map"
GROUPED = "Transformer Engine 2.11 pytorch/module/grouped_linear.py: saves inputmats"


class Grouped(TransformerEngine):
    """Permutations of tokens, one matrix for each expert, matrices that are not split."""

    def duplicated(self, x: Tensor, module: str, width: str, out: Shape, *, bias: bool, fused: bool = True) -> Tensor:
        """y = x W^T with the same W on every tensor-parallel rank. Keeps x.

        `fused`: the weight's gradient is added to the main gradient where that lies; else it is made first.
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
        """A copy of each token for each expert it visits. What makes the map of rows (`experts`) keeps it.

        Of a token two numbers for each expert, and one more (pytorch/triton/permutation.py: make_row_id_map). The
        tokens and their weights are permuted by one kernel, and brought back by the same map.
        """
        y = self.tape.new(name, out, x.dtype, PERMUTATION)
        kept: tuple[int, ...] = ()
        if experts is not None:
            kept = (self.tape.store("row map of the experts", (*x.shape[:-1], f"2·{experts}+1"), "int32", PERMUTATION),)
        self.tape.nodes.append(Node(name, (x,), (y,), kept, (NEW,), also_allocates=kept))
        return y

    def summed_experts(self, x: Tensor, out: Shape, name: str) -> Tensor:
        """The copies of a token added up, by the map that they were made by."""
        y = self.tape.new(name, out, x.dtype, PERMUTATION)
        self.tape.nodes.append(Node(name, (x,), (y,), (), (NEW,)))
        return y

    def regrouped(self, x: Tensor, out: Shape, name: str) -> Tensor:
        """The same rows in another order, in a new tensor both ways (sort_chunks_by_idxs)."""
        y = self.tape.new(name, out, x.dtype, PERMUTATION)
        self.tape.nodes.append(Node(name, (x,), (y,), (), (NEW,)))
        return y

    def grouped(self, x: Tensor, module: str, weight: Shape, out: Shape, *, bias: bool) -> Tensor:
        """One matrix for each expert of the rank; keeps x. Weights' gradients are added where main gradients lie."""
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
                also_allocates=kept if kept != (x.storage,) else (),
                forward_temporaries=made,
                backward_temporaries=self._output_gradient(out, module),
                parameters=gradients,
                module=module,
                multiplies=True,
            )
        )
        return y

    def weighted_glu(self, x: Tensor, weights: Tensor, name: str, out: Shape) -> Tensor:
        """act(gate) * up * router weight in one kernel: keeps the tensor of gate and up, and the weights."""
        citation = "Megatron-LM core_r0.14 core/fusions/fused_bias_swiglu.py: WeightedSwiGLUFunction"
        y = self.tape.new(name, out, x.dtype, citation)
        self.tape.nodes.append(Node(name, (x, weights), (y,), (x.storage, weights.storage), (NEW, NEW)))
        return y
