"""Transformer Engine's fused modules, as used in Megatron-Core's layers.

Sources: Transformer Engine 2.11 pytorch/module/linear.py, layernorm_linear.py; Megatron-LM core_r0.14
core/tensor_parallel/layers.py, core/fusions. The GEMM of a weight gradient accumulates into the main gradient in place
(gradient_accumulation_fusion), so it produces no separate gradient.
"""

from __future__ import annotations

from memcalc.ledger.component import Component
from memcalc.operators.base import Base
from memcalc.programs import operator_workspaces
from memcalc.programs.tape import IN_PLACE, NEW, BackwardMemory, ForwardMemory, Node, Shape, Tensor

TE = "Transformer Engine 2.11 pytorch/"
MEGATRON = "Megatron-LM core_r0.14 core/"


class TransformerEngine(Base):
    """Fused norms, column- and row-parallel linear layers, gated activations, and losses that overwrite the logits."""

    def te_norm(self, x: Tensor, module: str, width: str, tensors: tuple[str, ...], *, mean: bool) -> Tensor:
        """LayerNorm or RMSNorm in one kernel; saves x and its statistics in fp32."""
        citation = f"{TE}module/layernorm_linear.py: saves inputmat, mu, rsigma"
        names = ("mean", "reciprocal deviation") if mean else ("reciprocal deviation",)
        y = self.tape.new(f"{module} output", x.shape, x.dtype, citation)
        kept = tuple(self.tape.store(f"{module} {name}", x.shape[:-1], "fp32", citation) for name in names)
        gradients = tuple(self.parameter_gradient(module, t, (width,), self.parameters) for t in tensors)
        saved = (x.storage, *kept)
        self.tape.nodes.append(
            Node(
                module, (x,), (y,), saved, (NEW,), forward=ForwardMemory(also=kept), parameters=gradients, module=module
            )
        )
        return y

    def column_parallel(
        self, x: Tensor, module: str, weight: str, out: Shape, *, bias: bool, shared: bool = False, tied: bool = False
    ) -> Tensor:
        """y = x W^T + b, with W sharded along its outputs; saves x.

        Under sequence parallelism x is gathered in forward and, for the weight gradient, again in backward. The
        gradient of the full x is reduce-scattered.

        Args:
            x: the input.
            module: its name.
            weight: the axis of the outputs.
            out: axes of the output.
            bias: whether there is a bias.
            shared: whether the gathered input is in a persistent buffer, so it is no temporary of this layer.
            tied: whether the weight is the embedding's; a separate gradient then waits for the embedding's.
        """
        citation = f"{TE}module/linear.py: gather_along_first_dim, reduce_scatter_along_first_dim"
        whole = self._whole(x.shape)
        kept, made = self._kept_input(x, module)
        travels = x.dtype if self.fp8 == "none" else "uint8"
        gathered: tuple[int, ...] = ()
        unscattered: tuple[int, ...] = ()
        if whole is not None:
            if not shared and self.fuses_weight_gradients:  # Megatron-Core's own layers share such a buffer
                gathered = (self._transfer(f"{module} gathered input", whole, travels, citation),)
            unscattered = (self._transfer(f"{module} input gradient before its scatter", whole, x.dtype, citation),)
        y = self.tape.new(f"{module} output", out, x.dtype, citation)
        self.tape.nodes.append(
            Node(
                module,
                (x,),
                (y,),
                kept,
                (NEW,),
                forward=ForwardMemory(also=kept if kept != (x.storage,) else (), temporaries=(*gathered, *made)),
                backward=BackwardMemory(temporaries=(*gathered, *unscattered, *self._output_gradient(out, module))),
                parameters=self._gradients(module, (weight, x.shape[-1]), bias=bias, tied=tied),
                module=module,
                multiplies=True,
            )
        )
        return y

    def row_parallel(self, x: Tensor, module: str, out: Shape, *, bias: bool) -> Tensor:
        """y = x W^T, with W sharded along its inputs and the output summed across ranks; saves x.

        Under sequence parallelism the sum is reduce-scattered: the full output exists in forward, its full gradient in
        backward.
        """
        citation = f"{TE}module/linear.py: reduce_scatter_along_first_dim, grad_output_preprocess"
        whole = self._whole(out)
        product: tuple[int, ...] = ()
        gradient: tuple[int, ...] = ()
        if whole is not None:
            product = (self._transfer(f"{module} output before its scatter", whole, x.dtype, citation),)
            gradient = (self._transfer(f"{module} gathered output gradient", whole, x.dtype, citation),)
        kept, made = self._kept_input(x, module)
        y = self.tape.new(f"{module} output", out, x.dtype, citation)
        self.tape.nodes.append(
            Node(
                module,
                (x,),
                (y,),
                kept,
                (NEW,),
                forward=ForwardMemory(also=kept if kept != (x.storage,) else (), temporaries=(*product, *made)),
                # an input saved in bf16 is quantized to FP8 again
                backward=BackwardMemory(
                    temporaries=(
                        *gradient,
                        *self._output_gradient(whole or out, module),
                        *(made if kept == (x.storage,) else ()),
                    )
                ),
                parameters=self._gradients(module, (out[-1], *x.shape[2:]), bias=bias),
                module=module,
                multiplies=True,
            )
        )
        return y

    def _kept_input(self, x: Tensor, module: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the tensor that a linear layer saves for its input, and further copies that forward allocates.

        In FP8 one byte per element: of two layouts, forward's is freed after the GEMM (pytorch/module/linear.py,
        update_usage). Attention saves its output, so without scaling history Megatron-Core lets the output projection
        save that same tensor (core/transformer/attention.py: set_save_original_input).
        """
        if self.fp8 == "none" or (self.fp8 != "delayed" and module.endswith("attention.o_proj")):
            made = () if self.fp8 == "none" else (self._in_8_bits(x.shape, f"{module} input"),)
            return (x.storage,), made
        kept = (self._in_8_bits(x.shape, f"{module} input"), *self._scales(x.shape, f"{module} input"))
        return kept, (self._in_8_bits(x.shape, f"{module} input in forward's layout"),) if self.fp8_columns else ()

    def _output_gradient(self, shape: Shape, module: str) -> tuple[int, ...]:
        """Storages of a layer's output gradient in FP8, in the layouts of both backward GEMMs."""
        if self.fp8 == "none":
            return ()
        names = (f"{module} output gradient", f"{module} output gradient, other layout")
        made = [self._in_8_bits(shape, name) for name in names[: 1 + self.fp8_columns]]
        if self.fp8 == "blockwise":
            made += [self._block_scales(shape, name, by_columns=name == names[1]) for name in names]
        return tuple(made)

    def _in_8_bits(self, shape: Shape, name: str) -> int:
        return self.tape.store(f"{name} in FP8", shape, "uint8", f"{TE}tensor/float8_tensor.py: make_empty")

    def _scales(self, shape: Shape, name: str) -> tuple[int, ...]:
        """Storages of the scales of what is saved, in the layout of backward."""
        if self.fp8 == "blockwise":
            return (self._block_scales(shape, name, by_columns=True),)
        if self.fp8 != "mxfp8":
            return ()
        rule = operator_workspaces.named(operator_workspaces.mxfp8_scales, axes=shape)
        return (self.tape.store(f"{name} scales", (), "uint8", f"{TE}tensor/mxfp8_tensor.py: make_empty", rule=rule),)

    def _block_scales(self, shape: Shape, name: str, *, by_columns: bool) -> int:
        """Scales per block of 128 features of a token, or of 128 tokens of a feature."""
        tokens, width = shape[:-1], shape[-1:]
        along, across = (tokens, width) if by_columns else (width, tokens)
        rule = operator_workspaces.named(operator_workspaces.block_scales, along=along, across=across)
        citation = f"{TE}tensor/float8_blockwise_tensor.py: get_scale_shape"
        return self.tape.store(f"{name} scales", (), "uint8", citation, rule=rule)

    def fused_glu(self, x: Tensor, name: str, out: Shape) -> Tensor:
        """act(gate) * up of one tensor with both, one kernel each in forward and backward; saves only that tensor."""
        citation = f"{MEGATRON}fusions/fused_bias_swiglu.py: SwiGLUFunction saves its input"
        y = self.tape.new(name, out, x.dtype, citation)
        self.tape.nodes.append(Node(name, (x,), (y,), (x.storage,), (NEW,)))
        return y

    def exchanged(self, x: Tensor, name: str) -> Tensor:
        """All-to-all between ranks: equally many elements, in a new tensor, in forward and backward."""
        y = self.tape.new(name, x.shape, x.dtype, f"{TE}attention/dot_product_attention/context_parallel.py")
        self.tape.nodes.append(Node(name, (x,), (y,), (), (NEW,)))
        return y

    def scattered_sequence(self, x: Tensor, name: str, out: Shape) -> Tensor:
        """Reduce-scatter along the sequence; backward gathers the gradient."""
        y = self.tape.new(name, out, x.dtype, f"{MEGATRON}tensor_parallel/mappings.py")
        self.tape.nodes.append(Node(name, (x,), (y,), (), (NEW,)))
        return y

    def cross_entropy_in_place(self, logits: Tensor) -> Tensor:
        """Cross-entropy that overwrites the logits with their gradient and saves nothing else; backward passes it on.

        The losses of the tokens, and three fp32 numbers per token for the sum across ranks, are freed when forward
        returns.
        """
        citation = f"{TE}triton/cross_entropy.py, cross_entropy.py: the gradient is stored in the logits"
        tokens = logits.shape[:-1]
        loss = self.tape.new("loss of each token", tokens, "fp32", citation)
        statistics = tuple(
            self.tape.store(f"softmax statistic {n}", tokens, "fp32", citation) for n in ("maximum", "sum", "label")
        )
        self.tape.nodes.append(
            Node(
                "cross_entropy",
                (logits,),
                (loss,),
                (logits.storage,),
                (IN_PLACE,),
                forward=ForwardMemory(temporaries=statistics),
            )
        )
        return loss

    def vocab_parallel_cross_entropy(self, logits: Tensor) -> Tensor:
        """Megatron-Core's cross-entropy: saves an fp32 copy that becomes the softmax, then its gradient.

        fp32 logits are not copied, but overwritten.
        """
        citation = f"{MEGATRON}tensor_parallel/cross_entropy.py: VocabParallelCrossEntropy"
        tokens = logits.shape[:-1]
        copied = logits.dtype != "fp32"
        softmax = self.tape.store("softmax in fp32", logits.shape, "fp32", citation) if copied else logits.storage
        masks = self.tape.store("target mask", tokens, "bool", citation)
        targets = self.tape.store("masked targets", tokens, "int64", citation)
        loss = self.tape.new("loss of each token", tokens, "fp32", citation)
        kept = (softmax, masks, targets)
        made, gradient = (kept, NEW) if copied else (kept[1:], IN_PLACE)
        self.tape.nodes.append(
            Node("cross_entropy", (logits,), (loss,), kept, (gradient,), forward=ForwardMemory(also=made))
        )
        return loss

    def _whole(self, shape: Shape) -> Shape | None:
        """Return the full sequence's axes for a tensor sharded along the sequence; None if it is not."""
        return tuple("s" if axis == "s/t" else axis for axis in shape) if "s/t" in shape else None

    def _transfer(self, name: str, shape: Shape, dtype: str, citation: str) -> int:
        return self.tape.store(name, shape, dtype, citation, component=Component.COMMUNICATION_BUFFERS)

    def _gradients(self, module: str, weight: Shape, *, bias: bool, tied: bool = False) -> tuple[int, ...]:
        """Separate gradients of a linear layer: the bias's; the weight's only without gradient accumulation fusion."""
        made: tuple[int, ...] = ()
        if not self.fuses_weight_gradients:
            made = (self.parameter_gradient(module, "weight", weight, self.parameters),)
            if tied:
                self.tape.gradients.deferred.add(made[0])
                self.tape.gradients.tied = made[0]
        return (*made, self.parameter_gradient(module, "bias", weight[:1], self.parameters)) if bias else made
