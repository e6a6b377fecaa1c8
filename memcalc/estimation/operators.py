"""The operators of PyTorch that blocks are written in: what each allocates, keeps for backward, and makes in it.

What an operator keeps is what its entry in torch 2.13's tools/autograd/derivatives.yaml names in its gradient
formulas; hidden buffers are the rules of `workspaces`. Under autocast, operators cast their inputs as the lists of
torch/csrc's autocast_mode.h say: matrix products to the autocast dtype, norms, softmax and losses to fp32.
"""

from __future__ import annotations

from memcalc.estimation import workspaces
from memcalc.estimation.tape import NEW, SAME, Node, Shape, Tape, Tensor
from memcalc.ledger.component import Component
from memcalc.spec.recipes import DTYPE_BYTES

DERIVATIVES = "torch 2.13 tools/autograd/derivatives.yaml"


class Operators:
    """A tape with the vocabulary of a module's forward.

    Args:
        tape: where the operators are recorded.
        compute: dtype of forward and backward, "bf16", "fp16" or "fp32".
        parameters: dtype of the weights.
        autocast: whether torch.autocast is on, in the compute dtype.
        rows: the axes over which tokens run, for sums over all of them.
    """

    def __init__(self, tape: Tape, compute: str, parameters: str, autocast: bool) -> None:
        self.tape = tape
        self.compute = compute
        self.parameters = parameters
        self.autocast = autocast
        self._weight_casts: dict[tuple[str, str], Tensor] = {}

    # -- linear ------------------------------------------------------------------------------------------------------

    def linear(
        self, x: Tensor, module: str, weight: Shape, out: Shape, *, bias: bool, row: bool = False, tied: bool = False
    ) -> Tensor:
        """y = x W^T + b. Keeps x (and W, which is no new memory); backward makes dx, dW and db.

        db is a sum over all tokens, see `workspaces.column_sum`. Under sequence parallelism a column-parallel matrix
        gathers its input, which is kept as the rank's own part, and a row-parallel one scatters its output.

        Args:
            x: the input.
            module: name of the module, whose parameters are `weight` and `bias`.
            weight: axes of the weight, [out, in].
            out: axes of the output.
            bias: whether there is one.
            row: whether tensor parallelism splits the input axis.
            tied: the weight is the embedding's: its gradient waits for that of the embedding.
        """
        given = x
        x = self._autocast_input(x, module)
        tape = self.tape
        gathered = self._gathered(x, module) if not row else self._gathered(Tensor(-1, out, x.dtype), module)
        dtype = self.compute if self.autocast else x.dtype
        y = tape.new(f"{module} output", out, dtype, "torch.nn.functional.linear")
        casts: list[Tensor] = []
        parameters: list[int] = []
        temporaries: list[int] = []
        for tensor, shape in (("weight", weight), ("bias", (weight[0],))):
            if tensor == "bias" and not bias:
                continue
            gradient = self._parameter_gradient(module, tensor, shape, self.parameters)
            if tied and tensor == "weight":
                tape.deferred.add(gradient)
            if self.parameters == dtype:
                parameters.append(gradient)
            else:
                casts.append(self._cast_weight(module, tensor, shape, gradient))
        if bias:
            # Of input and output one may be seen head by head; the other's leading axes are the tokens.
            leading = min(x.shape[:-1], out[:-1], key=len)
            tokens = tuple("s" if axis == "s/t" else axis for axis in leading)
            rule = workspaces.named(workspaces.column_sum, rows=tokens, columns=(weight[0],))
            temporaries.append(tape.store(f"{module} bias sum", (), "uint8", "ATen native/cuda/Reduce.cuh", rule=rule))
        node = Node(
            module,
            (x, *casts),
            (y,),
            (x.storage, *(cast.storage for cast in casts[:1])),  # the weight's; no gradient needs the bias
            (NEW, *(NEW for _ in casts)),
            caller_holds=(given.storage,),
            forward_temporaries=gathered,
            backward_temporaries=(*gathered, *temporaries),
            parameters=tuple(parameters),
        )
        tape.nodes.append(node)
        return y

    def _gathered(self, x: Tensor, module: str) -> tuple[int, ...]:
        """The whole sequence of a tensor of which the rank keeps a part (Korthikanti et al. section 4.2.2)."""
        if "s/t" not in x.shape:
            return ()
        whole = tuple("s" if axis == "s/t" else axis for axis in x.shape)
        citation = "Korthikanti et al. (arXiv 2205.05198) section 4.2.2: gathered in forward and again in backward"
        name = f"{module} gathered sequence"
        return (self.tape.store(name, whole, x.dtype, citation, component=Component.COMMUNICATION_BUFFERS),)

    def batched_linear(self, x: Tensor, module: str, weight: Shape, out: Shape, *, bias: bool) -> Tensor:
        """One matrix for each expert: bmm, baddbmm with a bias. Keeps x; backward makes dx, dW and db."""
        x = self._autocast_input(x, module)
        y = self.tape.new(f"{module} output", out, x.dtype, "aten::baddbmm" if bias else "aten::bmm")
        shapes = {"weight": weight, "bias": (weight[0], weight[2])} if bias else {"weight": weight}
        gradients = {name: self._parameter_gradient(module, name, s, self.parameters) for name, s in shapes.items()}
        temporaries: tuple[int, ...] = ()
        if bias:
            rule = workspaces.named(workspaces.column_sum, rows=out[1:2], columns=shapes["bias"])
            sums = self.tape.store(f"{module} bias sum", (), "uint8", "ATen native/cuda/Reduce.cuh", rule=rule)
            temporaries = (sums,)
        casts: list[Tensor] = []
        if self.parameters != x.dtype:
            casts = [self._cast_weight(module, name, s, gradients[name]) for name, s in shapes.items()]
        node = Node(
            module,
            (x, *casts),
            (y,),
            (x.storage, *(cast.storage for cast in casts[:1])),  # the weight's; no gradient needs the bias
            (NEW, *(NEW for _ in casts)),
            backward_temporaries=temporaries,
            parameters=() if casts else tuple(gradients.values()),
        )
        self.tape.nodes.append(node)
        return y

    def unwritten_parameter(self, module: str, tensor: str, shape: Shape) -> None:
        """A parameter whose operators are not written: its gradient alone."""
        gradient = self._parameter_gradient(module, tensor, shape, self.parameters)
        self.tape.nodes.append(Node(module, (), (), (), (), parameters=(gradient,)))

    def embedding(
        self, module: str, table: Shape, tokens: Shape, *, tied: bool = False, counts: bool = False
    ) -> Tensor:
        """Rows of a table; keeps the indices, which are the inputs. The gradient of the table is dense.

        `counts`: the indices are positions, counted out in this forward, so keeping them is new memory.
        """
        tape = self.tape
        y = tape.new(f"{module} output", (*tokens, table[1]), self.parameters, "torch.nn.functional.embedding")
        rule = workspaces.named(workspaces.embedding_backward, tokens=tokens, rows=table[0], width=table[1])
        scratch = tape.store(f"{module} sort and sums", (), "uint8", "ATen native/cuda/Embedding.cu", rule=rule)
        gradient = self._parameter_gradient(module, "weight", table, self.parameters)
        temporaries: tuple[int, ...] = (scratch,)
        if tied:
            # The head's gradient waits for this one. It is the transpose of a product, a view, so their sum is a third
            # tensor; under autocast it is a cast of that, which nothing else refers to, and takes the sum in place.
            citation = "torch 2.13 autograd/input_buffer.cpp: a shared leaf's gradients are summed out of place"
            names = [f"{module} gradient before the sum"]
            if not self.autocast:
                names.append(f"{module} sum with the tied head's gradient")
            temporaries = (scratch, *(tape.store(name, table, self.parameters, citation) for name in names))
            tape.arrives_summed = gradient
        kept: tuple[int, ...] = ()
        if counts:
            kept = (tape.store(f"{module} indices", tokens, "int64", DERIVATIVES, component=Component.TEMPORARIES),)
        node = Node(
            module,
            (),
            (y,),
            kept,
            (),
            also_allocates=kept,
            backward_temporaries=temporaries,
            parameters=() if tied else (gradient,),
        )
        tape.nodes.append(node)
        return y

    # -- norms -------------------------------------------------------------------------------------------------------

    def layer_norm(
        self,
        x: Tensor,
        module: str,
        width: str,
        tensors: tuple[str, ...] = ("weight", "bias"),
        out: Shape | None = None,
    ) -> Tensor:
        """Keeps x, and mean and reciprocal deviation in fp32 (ATen native/cuda/layer_norm_kernel.cu)."""
        return self._fused_norm(x, module, width, ("mean", "reciprocal deviation"), tensors, out)

    def rms_norm(
        self, x: Tensor, module: str, width: str, tensors: tuple[str, ...] = ("weight",), out: Shape | None = None
    ) -> Tensor:
        """torch.nn.RMSNorm, fused since torch 2.9: keeps x and the reciprocal deviation in fp32."""
        return self._fused_norm(x, module, width, ("reciprocal deviation",), tensors, out)

    def _fused_norm(
        self,
        x: Tensor,
        module: str,
        width: str,
        statistics: tuple[str, ...],
        tensors: tuple[str, ...],
        out: Shape | None,
    ) -> Tensor:
        """`out`: the output's shape where it is seen with other axes."""
        tape = self.tape
        if self.autocast:
            x = self.cast(x, "fp32")  # autocast's fp32 list
        citation = "ATen native/cuda/layer_norm_kernel.cu: x, mean and rstd are saved"
        y = tape.new(f"{module} output", out or x.shape, x.dtype, "torch.nn.functional.layer_norm, rms_norm")
        kept = [tape.store(f"{module} {name}", x.shape[:-1], "fp32", citation) for name in statistics]
        item_bytes = DTYPE_BYTES[self.parameters]
        rule = workspaces.named(
            workspaces.norm_backward,
            rows=tuple(x.shape[:-1]),
            width=width,
            item_bytes=item_bytes,
            buffers=len(tensors),
        )
        scratch = tape.store(f"{module} partial sums", (), "uint8", citation, rule=rule)
        gradients = tuple(self._parameter_gradient(module, t, (width,), self.parameters) for t in tensors)
        node = Node(
            module,
            (x,),
            (y,),
            (x.storage, *kept),
            (NEW,),
            also_allocates=tuple(kept),
            backward_temporaries=(scratch,) if tensors else (),
            parameters=gradients,
        )
        tape.nodes.append(node)
        return y

    # -- elementwise -------------------------------------------------------------------------------------------------

    def add(self, a: Tensor, b: Tensor, name: str) -> Tensor:
        """a + b; keeps nothing, hands the gradient on as it is (cast where the sum has another dtype)."""
        dtype = _wider(a.dtype, b.dtype)
        y = self.tape.new(name, a.shape, dtype, DERIVATIVES, grad=a.grad or b.grad)
        gradients = tuple((SAME if t.dtype == dtype else NEW) if t.grad else None for t in (a, b))
        self.tape.nodes.append(Node(name, (a, b), (y,), (), gradients))
        return y

    def mul(self, a: Tensor, b: Tensor, name: str, shape: Shape | None = None, *, reduces: bool = False) -> Tensor:
        """a * b; keeps each factor whose partner needs a gradient.

        `reduces`: b is broadcast along the last axis, so its gradient is first made as large as a, then summed.
        """
        y = self.tape.new(name, shape or a.shape, _wider(a.dtype, b.dtype), DERIVATIVES, grad=a.grad or b.grad)
        saved = [t.storage for t, other in ((a, b), (b, a)) if other.grad]
        gradients = tuple(NEW if t.grad else None for t in (a, b))
        temporaries: tuple[int, ...] = ()
        if reduces:
            temporaries = (self.tape.store(f"{name} gradient before its sum", a.shape, y.dtype, DERIVATIVES),)
        self.tape.nodes.append(Node(name, (a, b), (y,), tuple(saved), gradients, backward_temporaries=temporaries))
        return y

    def mul_table(self, x: Tensor, name: str, dtype: str) -> Tensor:
        """x times a table of `dtype` that needs no gradient and is shared by all layers: keeps nothing of its own."""
        y = self.tape.new(name, x.shape, _wider(x.dtype, dtype), DERIVATIVES)
        self.tape.nodes.append(Node(name, (x,), (y,), (), (NEW,)))
        return y

    def times_weight(self, x: Tensor, module: str, width: str, out: Shape | None = None) -> Tensor:
        """x times a parameter of its last axis; keeps x. The parameter's gradient is a sum over all tokens."""
        tape = self.tape
        y = tape.new(f"{module} output", out or x.shape, _wider(x.dtype, self.parameters), DERIVATIVES)
        product = tape.store(f"{module} gradient times input", x.shape, y.dtype, DERIVATIVES)
        rule = workspaces.named(workspaces.column_sum, rows=tuple(x.shape[:-1]), columns=(width,))
        staging = tape.store(f"{module} weight sum", (), "uint8", "ATen native/cuda/Reduce.cuh", rule=rule)
        gradient = self._parameter_gradient(module, "weight", (width,), self.parameters)
        temporaries = (product, staging)
        node = Node(module, (x,), (y,), (x.storage,), (NEW,), backward_temporaries=temporaries, parameters=(gradient,))
        tape.nodes.append(node)
        return y

    def mean(self, x: Tensor, name: str) -> Tensor:
        """The mean over the last axis; keeps nothing, its gradient is spread over a new tensor."""
        y = self.tape.new(name, x.shape[:-1], x.dtype, DERIVATIVES)
        self.tape.nodes.append(Node(name, (x,), (y,), (), (NEW,)))
        return y

    def slices(self, x: Tensor, shapes: tuple[Shape, ...], name: str) -> tuple[Tensor, ...]:
        """Views cut out one by one: the gradient of each is a tensor of zeros as large as x, filled in one part."""
        parts = tuple(Tensor(x.storage, shape, x.dtype) for shape in shapes)
        for index, part in enumerate(parts):
            self.tape.nodes.append(Node(f"{name} slice {index}", (x,), (part,), (), (NEW,)))
        return parts

    def scale(self, x: Tensor, name: str) -> Tensor:
        """x times (or plus) a number; keeps nothing."""
        return self._unary(x, name, saves_input=False)

    def shift(self, x: Tensor, name: str) -> Tensor:
        """x plus a number or a tensor without gradient: a new tensor forward, the same gradient backward."""
        y = self.tape.new(name, x.shape, x.dtype, DERIVATIVES)
        self.tape.nodes.append(Node(name, (x,), (y,), (), (SAME,)))
        return y

    def pow(self, x: Tensor, name: str) -> Tensor:
        """x to a power: keeps x; on autocast's fp32 list."""
        return self.pointwise(self.cast(x, "fp32") if self.autocast else x, name)

    def pointwise(self, x: Tensor, name: str, *, saves: str = "input") -> Tensor:
        """gelu, silu, relu, tanh...: keeps its input or its output."""
        y = self.tape.new(name, x.shape, x.dtype, DERIVATIVES)
        saved = x.storage if saves == "input" else y.storage
        self.tape.nodes.append(Node(name, (x,), (y,), (saved,), (NEW,)))
        return y

    def dropout(self, x: Tensor, name: str, rate: float) -> Tensor:
        """Keeps a mask of one byte an element (native_dropout); at rate 0 nothing happens at all."""
        if rate == 0:
            return x
        y = self.tape.new(f"{name} output", x.shape, x.dtype, "ATen native/cuda/Dropout.cu")
        mask = self.tape.store(f"{name} mask", x.shape, "bool", "ATen native/cuda/Dropout.cu: a bool mask is saved")
        self.tape.nodes.append(Node(name, (x,), (y,), (mask,), (NEW,), also_allocates=(mask,)))
        return y

    def cast(self, x: Tensor, dtype: str, name: str | None = None) -> Tensor:
        """x in another dtype: a copy, and its gradient one in the old dtype. Nothing where x has it already."""
        if x.dtype == dtype:
            return x
        name = name or f"{self.tape.storages[x.storage].name} in {dtype}"
        y = self.tape.new(name, x.shape, dtype, "aten::_to_copy", grad=x.grad)
        self.tape.nodes.append(Node(name, (x,), (y,), (), (NEW if x.grad else None,)))
        return y

    def copy(self, x: Tensor, name: str, shape: Shape | None = None) -> Tensor:
        """A contiguous (or expanded) copy. Backward hands the gradient on, or sums it where axes were expanded."""
        y = self.tape.new(name, shape or x.shape, x.dtype, "aten::clone")
        same = shape is None or shape == x.shape
        self.tape.nodes.append(Node(name, (x,), (y,), (), (SAME if same else NEW,)))
        return y

    def broadcast_add(self, x: Tensor, rows: Tensor, name: str) -> Tensor:
        """x + rows, which are the same for every sequence: the gradient of rows is a sum over the batch."""
        y = self.tape.new(name, x.shape, x.dtype, DERIVATIVES)
        self.tape.nodes.append(Node(name, (x, rows), (y,), (), (SAME, NEW)))
        return y

    def gather(self, x: Tensor, out: Shape, name: str, padded: Shape | None = None) -> Tensor:
        """Chosen rows of x; keeps their indices, 8 bytes each. `padded` is the shape after rounding rows up."""
        tape = self.tape
        y = tape.new(name, out, x.dtype, "aten::index")
        tokens = out[:-1] if len(out) > 3 else out
        index = tape.store(f"{name} indices", tokens, "int64", "aten::index saves its indices")
        tape.nodes.append(Node(name, (x,), (y,), (index,), (NEW,), also_allocates=(index,)))
        return y if padded is None else self.copy(y, f"{name}, rounded up", padded)

    def normalized(self, x: Tensor, name: str) -> Tensor:
        """x / its sum over the last axis: division keeps both."""
        y = self.tape.new(name, x.shape, x.dtype, DERIVATIVES)
        total = self.tape.store(f"sum for {name}", x.shape[:-1], x.dtype, DERIVATIVES)
        self.tape.nodes.append(Node(name, (x,), (y,), (x.storage, total), (NEW,), also_allocates=(total,)))
        return y

    def scattered(self, x: Tensor, out: Shape, name: str) -> Tensor:
        """Rows added up into fewer (index_add); backward gathers them again.

        Keeps the rows, though only for their shape: index_add's gradient formula names its source.
        """
        y = self.tape.new(name, out, x.dtype, "aten::index_add")
        self.tape.nodes.append(Node(name, (x,), (y,), (x.storage,), (NEW,)))
        return y

    def keep(self, y: Tensor, name: str, shape: Shape, dtype: str) -> None:
        """The operator that made y also keeps a small tensor of its own, without gradient."""
        node = next(node for node in reversed(self.tape.nodes) if y in node.outputs)
        extra = self.tape.store(name, shape, dtype, DERIVATIVES)
        node.saved += (extra,)
        node.also_allocates += (extra,)

    def softmax(self, x: Tensor, name: str) -> Tensor:
        """Keeps its output; backward needs a temporary of the same size (gradient * output)."""
        if self.autocast:
            x = self.cast(x, "fp32")  # autocast's fp32 list
        y = self.tape.new(name, x.shape, x.dtype, DERIVATIVES)
        product = self.tape.store(f"{name} gradient times output", x.shape, x.dtype, "ATen native/cuda/SoftMax.cu")
        self.tape.nodes.append(Node(name, (x,), (y,), (y.storage,), (NEW,), backward_temporaries=(product,)))
        return y

    def matmul(self, a: Tensor, b: Tensor, name: str, out: Shape) -> Tensor:
        """a @ b in batches; keeps both factors."""
        if self.autocast:
            a, b = self.cast(a, self.compute), self.cast(b, self.compute)
        y = self.tape.new(name, out, a.dtype, "aten::bmm")
        saved = (a.storage, b.storage)
        self.tape.nodes.append(Node(name, (a, b), (y,), saved, (NEW, NEW)))
        return y

    def split(self, x: Tensor, shapes: tuple[Shape, ...], name: str) -> tuple[Tensor, ...]:
        """Views of one tensor that get gradients of their own; backward joins these into one new tensor."""
        parts = tuple(Tensor(x.storage, shape, x.dtype) for shape in shapes)
        self.tape.nodes.append(Node(name, (x,), parts, (), (NEW,)))
        return parts

    def concatenate(self, parts: tuple[Tensor, ...], out: Shape, name: str) -> Tensor:
        """One new tensor of several; the parts' gradients are views of its gradient."""
        dtype = "fp32" if any(part.dtype == "fp32" for part in parts) else parts[0].dtype
        y = self.tape.new(name, out, dtype, "aten::cat")
        kinds = tuple(SAME if part.dtype == dtype else NEW for part in parts)
        self.tape.nodes.append(Node(name, parts, (y,), (), kinds))
        return y

    # -- attention ---------------------------------------------------------------------------------------------------

    def flash_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: str,
        kv_heads: str,
        head_dim: str,
        length: str,
        *,
        copies: bool,
        out: Shape | None = None,
    ) -> Tensor:
        """Keeps q, k, v, its output, and fp32 log-sum-exps (flash_attn/flash_api.cpp).

        `copies`: q, k, v lie head by head in memory, so backward copies the output and its gradient first.
        """
        citation = "ATen native/transformers/cuda/flash_attn/flash_api.cpp"
        q, k, v = (self._autocast_input(t, "attention") for t in (q, k, v))
        name = "attention"
        y = self.tape.new(f"{name} output", out or q.shape, q.dtype, citation)
        lse = self.tape.store(f"{name} log-sum-exp", ("b", heads, length), "fp32", citation)
        rule = workspaces.named(
            workspaces.flash_backward,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            length=length,
            item_bytes=DTYPE_BYTES[q.dtype],
        )
        scratch = self.tape.store(f"{name} backward accumulators", (), "uint8", citation, rule=rule)
        contiguous = tuple(
            self.tape.store(f"{name} contiguous {what}", q.shape, q.dtype, citation)
            for what in (("output", "gradient") if copies else ())
        )
        # 24 bytes that the paper's activations do not have: a random seed with its offset, and an unused mask.
        state, mask = (
            self.tape.store(f"{name} {what}", (count,), "int64", citation, component=Component.TEMPORARIES)
            for what, count in (("random state", "2"), ("unused mask", "1"))
        )
        kept = (lse, state, mask)
        node = Node(
            name,
            (q, k, v),
            (y,),
            (*dict.fromkeys(t.storage for t in (q, k, v, y)), *kept),
            (NEW, NEW, NEW),
            also_allocates=kept,
            backward_temporaries=(scratch, *contiguous),
        )
        self.tape.nodes.append(node)
        return y

    def efficient_attention(self, q: Tensor, k: Tensor, v: Tensor, heads: str, head_dim: str, length: str) -> Tensor:
        """Keeps q, k, v, its output, and fp32 log-sum-exps (ATen native/transformers/cuda/attention.cu)."""
        citation = "ATen native/transformers/cuda/attention.cu, attention_backward.cu"
        q, k, v = (self._autocast_input(t, "attention") for t in (q, k, v))
        name = "attention"
        y = self.tape.new(f"{name} output", q.shape, q.dtype, citation)
        rows = workspaces.named(workspaces.log_sum_exp_rows, heads=heads, length=length)
        lse = self.tape.store(f"{name} log-sum-exp", ("b", heads, length), "fp32", citation, rule=rows)
        rule = workspaces.named(
            workspaces.efficient_backward,
            heads=heads,
            head_dim=head_dim,
            length=length,
            item_bytes=DTYPE_BYTES[q.dtype],
        )
        scratch = self.tape.store(f"{name} backward accumulators", (), "uint8", citation, rule=rule)
        saved = (*dict.fromkeys(t.storage for t in (q, k, v, y)), lse)
        node = Node(
            name, (q, k, v), (y,), saved, (NEW, NEW, NEW), also_allocates=(lse,), backward_temporaries=(scratch,)
        )
        self.tape.nodes.append(node)
        return y

    # -- loss --------------------------------------------------------------------------------------------------------

    def cross_entropy(self, logits: Tensor) -> Tensor:
        """log_softmax, which keeps its output, then the mean of the labels' rows, which keeps it too."""
        tape = self.tape
        log_probabilities = tape.new("log-probabilities", logits.shape, logits.dtype, DERIVATIVES)
        tape.nodes.append(Node("log_softmax", (logits,), (log_probabilities,), (log_probabilities.storage,), (NEW,)))
        loss = tape.new("loss", (), "fp32", DERIVATIVES)
        weight = tape.store("loss total weight", (), "fp32", "ATen native/cuda/Loss.cu")
        tape.nodes.append(
            Node(
                "nll_loss",
                (log_probabilities,),
                (loss,),
                (log_probabilities.storage, weight),
                (NEW,),
                also_allocates=(weight,),
            )
        )
        tape.hold(loss)
        return loss

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _unary(self, x: Tensor, name: str, *, saves_input: bool) -> Tensor:
        y = self.tape.new(name, x.shape, x.dtype, DERIVATIVES)
        self.tape.nodes.append(Node(name, (x,), (y,), (x.storage,) if saves_input else (), (NEW,)))
        return y

    def _cast_weight(self, module: str, tensor: str, shape: Shape, gradient: int) -> Tensor:
        """The cast of a leaf is cached until autocast's region ends; its backward makes the fp32 gradient."""
        name = f"{module}.{tensor} in {self.compute} (autocast cache)"
        citation = "ATen autocast_mode.cpp, cached_cast"
        storage = self.tape.store(name, shape, self.compute, citation, component=Component.TEMPORARIES)
        cast = Tensor(storage, shape, self.compute)
        self.tape.region.add(storage)
        self.tape.nodes.append(Node(f"{module}.{tensor} cast", (), (cast,), (), (), parameters=(gradient,)))
        return cast

    def _autocast_input(self, x: Tensor, module: str) -> Tensor:
        """Each use of an activation casts it anew: only casts of leaves are cached."""
        return self.cast(x, self.compute, f"{module} input in {self.compute}") if self.autocast else x

    def _parameter_gradient(self, module: str, tensor: str, shape: Shape, dtype: str) -> int:
        return self.tape.store(
            f"{module}.{tensor}",
            shape,
            dtype,
            "autograd: torch/csrc/autograd/functions/accumulate_grad.h",
            component=Component.GRADIENTS,
        )


def _wider(a: str, b: str) -> str:
    return "fp32" if "fp32" in (a, b) else a
