"""Operators of linear attention: its convolution, its triangular systems, and the scan over chunks of tokens."""

from __future__ import annotations

from memcalc.ledger.component import Component
from memcalc.operators.base import DERIVATIVES, Base, wider
from memcalc.programs.tape import CAST, NEW, BackwardMemory, ForwardMemory, Node, Shape, Tensor

CHUNKED = "transformers 5.23 models/qwen3_5/modeling_qwen3_5.py, torch_chunk_gated_delta_rule"
HEADS = ("b", "h_lv")


class LinearAttention(Base):
    """The gated delta rule as PyTorch operators, without the package flash-linear-attention."""

    def depthwise_convolution(
        self, x: Tensor, module: str, channels: str, out: Shape, *, bias: bool = False, views_weight: bool = False
    ) -> Tensor:
        """A convolution of each channel with w_c numbers; saves x and its weight, for whichever gradient it computes.

        The output has w_c - 1 more positions than the input; a slice of it is read.

        Args:
            x: the input.
            module: the module of the weight.
            channels: axis of the channels.
            out: axes of the slice.
            bias: whether there is a bias.
            views_weight: whether the weight is a view of the parameter, and x is cast to the parameter's dtype first.
                Autocast caches casts of parameters only, so the operator saves the cast.
        """
        tape, trains = self.tape, self.trains(module)
        dtype = self.compute if self.autocast else self.parameters
        given = self.cast(x, self.parameters) if views_weight else x
        weight = (channels, "1", "w_c")
        casts: tuple[Tensor, ...] = ()
        parameters: tuple[int, ...] = ()
        for tensor, shape in (("bias", (channels,)), ("weight", weight)) if bias else (("weight", weight),):
            gradient = self.parameter_gradient(module, tensor, shape, self.parameters) if trains else None
            if self.parameters == dtype:
                parameters = (gradient, *parameters) if gradient is not None else parameters
            elif tensor == "weight" and views_weight:
                casts = (self._cast_view(module, shape, gradient), *casts)
            else:
                casts = (self.cast_weight(module, tensor, shape, gradient), *casts)
        x = self.cast(given, dtype)
        y = tape.new(f"{module} output", ("b", channels, "s+w_c-1"), dtype, "aten::convolution")
        ordered = tape.store(f"{module} input by channel", x.shape, dtype, "aten::convolution: contiguous input")
        saved = (x.storage, *(cast.storage for cast in casts[:1]))  # convolution_backward is one formula of both
        tape.record(
            Node(
                module,
                (x, *casts),
                (y,),
                saved,
                (NEW, *(NEW for _ in casts)),
                referenced_by_caller=(given.storage,),
                forward=ForwardMemory(temporaries=(ordered,)),
                backward=BackwardMemory(temporaries=(ordered,)),
                parameters=parameters,
                keeps_weight=not trains,
                module=module,
            ),
            trains=trains,
        )
        read = Tensor(y.storage, out, dtype, strided=True)
        tape.record(Node(f"{module}, without the last positions", (y,), (read,), (), (NEW,)))
        return read

    def _cast_view(self, module: str, shape: Shape, gradient: int | None) -> Tensor:
        """Cast a view of a weight to the compute dtype, which autocast does not cache."""
        name, citation = f"{module}.weight in {self.compute}", "aten::_to_copy"
        storage = self.tape.store(name, shape, self.compute, citation, component=Component.TEMPORARIES)
        y = Tensor(storage, shape, self.compute, grad=gradient is not None)
        self.tape.record(
            Node(f"{module}.weight cast", (), (y,), (), (), parameters=() if gradient is None else (gradient,))
        )
        return y

    def times_parameter(self, x: Tensor, module: str, width: str, name: str, *, second: bool = False) -> Tensor:
        """x times a function of a parameter with few numbers, which is computed in its dtype; saves x.

        `second`: whether the parameter is the second factor, with a gradient computed before that of x.
        """
        tape, trains = self.tape, self.trains(module)
        dtype = wider(x.dtype, "fp32" if self.autocast else self.parameters)
        y = tape.new(name, x.shape, dtype, DERIVATIVES)
        gradient = (self.parameter_gradient(module, "weight", (width,), self.parameters),) if trains else ()
        product = (tape.store(f"{name}: gradient times input", x.shape, dtype, DERIVATIVES),) if trains else ()
        node = Node(
            name,
            (x,),
            (y,),
            (x.storage,) if trains else (),
            (NEW if x.dtype == dtype else CAST,),
            backward=BackwardMemory(prepares=tuple((index, 1) for index in product))
            if second
            else BackwardMemory(temporaries=product),
            parameters=gradient,
            keeps_weight=not trains,
            module=module,
        )
        tape.record(node)
        return y

    def squares(self, x: Tensor, name: str) -> Tensor:
        """x * x; saves x. Its gradient is a sum of two products."""
        y = self.tape.new(name, x.shape, x.dtype, DERIVATIVES)
        second = self.tape.store(f"{name}: second matmul", x.shape, x.dtype, DERIVATIVES)
        self.tape.record(Node(name, (x,), (y,), (x.storage,), (NEW,), backward=BackwardMemory(temporaries=(second,))))
        return y

    def differences(self, x: Tensor, name: str, pairs: Shape) -> Tensor:
        """The differences of all pairs of numbers along the last axis; saves nothing. Its gradient is two sums."""
        return self.result(name, pairs, x.dtype, (x,), (), (NEW,))

    def solved(self, system: Tensor, right: Tensor, name: str) -> Tensor:
        """torch.linalg.solve_triangular; saves the system and the solution, both gradients are new tensors."""
        y = self.tape.new(name, right.shape, right.dtype, "aten::linalg_solve_triangular")
        self.tape.record(Node(name, (right, system), (y,), (system.storage, y.storage), (NEW, NEW)))
        return y

    def scanned(self, values: Tensor, decayed: Tensor, query: Tensor, scores: Tensor, key: Tensor) -> Tensor:
        """The loop over chunks: reads and updates the state, and fills the output.

        A chunk saves views of the inputs, its corrected values, and the state before it. Under autocast its four
        matmuls save casts of their factors instead, and the state once more in fp32, for its decay. Backward fills the
        gradients of the inputs slice by slice; each slice is a tensor of zeros as large as the input.
        """
        tape, state = self.tape, (*HEADS, "d_lk", "d_lv", "s_64")
        y = tape.new("linear attention by chunk", values.shape, "fp32", CHUNKED)
        saved = [("states", state, "fp32"), ("corrected values", values.shape, "fp32")]
        if self.autocast:
            factors = ("decayed keys", decayed), ("queries", query), ("scores", scores), ("keys", key)
            saved = [("states", state, "fp32"), *((name, x.shape, self.compute) for name, x in factors)]
            saved += [(f"states, {reader}", state, self.compute) for reader in ("corrected", "read")]
            saved += [(f"corrected values, {reader}", values.shape, self.compute) for reader in ("read", "written")]
        kept = tuple(tape.store(f"{name} of chunks", shape, dtype, CHUNKED) for name, shape, dtype in saved)
        filled = tape.store("output gradient of one chunk", values.shape, "fp32", "autograd: CopySlices")
        node = Node(
            "linear attention over chunks",
            (values, decayed, query, scores, key),
            (y,),
            tuple(dict.fromkeys((*kept, *(x.storage for x in (decayed, query, scores, key) if not self.autocast)))),
            (NEW,) * 5,
            forward=ForwardMemory(also=kept),
            backward=BackwardMemory(temporaries=(filled,)),
        )
        tape.record(node)
        return y
