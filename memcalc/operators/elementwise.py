"""Elementwise operators, activations, reductions, dropout, views and copies."""

from __future__ import annotations

from memcalc.ledger.component import Component
from memcalc.operators.base import DERIVATIVES, Base, wider
from memcalc.programs.program import SharedTable
from memcalc.programs.tape import ALIAS, CAST, NEW, REDUCED, SAME, BackwardMemory, ForwardMemory, Node, Shape, Tensor


class Elementwise(Base):
    """Elementwise operators, activations, reductions, dropout, views and copies."""

    def add(self, a: Tensor, b: Tensor, name: str) -> Tensor:
        """a + b; saves nothing and passes the gradient on unchanged (cast where the sum has another dtype)."""
        dtype = wider(a.dtype, b.dtype)
        gradients = tuple((SAME if t.dtype == dtype else NEW) if t.grad else None for t in (a, b))
        return self.result(name, a.shape, dtype, (a, b), (), gradients, grad=a.grad or b.grad)

    def subtract(self, a: Tensor, b: Tensor, name: str) -> Tensor:
        """a - b; saves nothing. The gradient of b is negated, and cast where the difference has another dtype."""
        dtype = wider(a.dtype, b.dtype)
        gradients = (SAME if a.dtype == dtype else NEW, NEW if b.dtype == dtype else CAST)
        return self.result(name, a.shape, dtype, (a, b), (), gradients)

    def mul(self, a: Tensor, b: Tensor, name: str, shape: Shape | None = None, *, reduces: bool = False) -> Tensor:
        """a * b; saves each factor if the other one requires a gradient.

        Args:
            a: the first factor.
            b: the second factor.
            name: name of the result.
            shape: axes of the result, if a is a slice of a larger tensor.
            reduces: whether b is broadcast along the last axis; its gradient is first as large as a, then summed.
        """
        y = self.tape.new(name, shape or a.shape, wider(a.dtype, b.dtype), DERIVATIVES, grad=a.grad or b.grad)
        seen = Tensor(a.storage, y.shape, a.dtype, strided=a.strided)
        saved = tuple(t for t, other in ((seen, b), (b, a)) if other.grad)
        # gradient of `other` before `self` (derivatives.yaml, by name)
        gradients = tuple((NEW if t.dtype == y.dtype else CAST) if t.grad else None for t in (b, a))
        if reduces and b.grad:
            gradients = (REDUCED, *gradients[1:])
        storages = tuple(t.storage for t in saved)
        self.tape.record(Node(name, (b, a), (y,), storages, gradients, variables=saved))
        return y

    def mul_table(self, x: Tensor, name: str, dtype: str, table: str = "") -> Tensor:
        """x times a table of `dtype` without gradient, shared by all layers; saves nothing but the table."""
        y = self.tape.new(name, x.shape, wider(x.dtype, dtype), DERIVATIVES)
        self.tape.record(Node(name, (x,), (y,), (), (NEW if x.dtype == y.dtype else CAST,)))
        self.tape.also_saves(Tensor(-1, (x.shape[1], x.shape[-1]), dtype))
        self.tape.reads(*(table,) * bool(table))
        return y

    def table(
        self,
        name: str,
        shape: Shape,
        dtype: str,
        citation: str = DERIVATIVES,
        component: Component | None = None,
        of: tuple[Tensor, ...] = (),
        table: SharedTable | None = None,
    ) -> Tensor:
        """A tensor created here, without gradient.

        Args:
            name: name of the tensor in rows.
            shape: its axes.
            dtype: its dtype.
            citation: its source.
            component: component, if not that of saved tensors.
            of: the tensors it is computed from.
            table: the table of the model, if it is one shared by layers.
        """
        storage = self.tape.store(name, shape, dtype, citation, component=component, table=table)
        y = Tensor(storage, shape, dtype, grad=False)
        self.tape.record(Node(name, of, (y,), (), (None,) * len(of)))
        return y

    def times_weight(
        self, x: Tensor, module: str, width: str, out: Shape | None = None, *, second: bool = False
    ) -> Tensor:
        """x times a parameter of its last axis; saves x. The parameter's gradient is a sum over all tokens.

        A frozen parameter has no gradient, and x, which only that gradient needs, is not saved.

        Args:
            x: the input.
            module: module of the parameter.
            width: axis of the parameter.
            out: axes of the result, where they differ from those of x.
            second: whether the parameter is the second factor, with a gradient computed before that of x.
        """
        tape = self.tape
        y = tape.new(f"{module} output", out or x.shape, wider(x.dtype, self.parameters), DERIVATIVES)
        if not self.trains(module):
            kind = NEW if x.dtype == y.dtype else CAST
            tape.record(Node(module, (x,), (y,), (), (kind,), keeps_weight=True, module=module))
            return y
        product = tape.store(f"{module} gradient times input", x.shape, y.dtype, DERIVATIVES)
        gradient = self.parameter_gradient(module, "weight", (width,), self.parameters)
        staging = self.column_sum(module, "weight", tuple(x.shape[:-1]), (width,))
        multiplied = ((product, 1),)
        sums: tuple[tuple[int, int], ...] = ((gradient, 1), *staging)
        if y.dtype != self.parameters:  # the engine sums in the output's dtype, then casts
            total = tape.store(f"{module} weight gradient in {y.dtype}", (width,), y.dtype, DERIVATIVES)
            sums = ((total, 1), *staging, (product, -1), (gradient, 1), (total, -1))
        node = Node(
            module,
            (x,),
            (y,),
            (x.storage,),
            (NEW if x.dtype == y.dtype else CAST,),
            backward=BackwardMemory(
                prepares=multiplied if second else (),
                between=() if second else multiplied,
                summed=(gradient,),
                summed_later=sums,
            ),
            parameters=(gradient,),
            module=module,
        )
        tape.record(node)
        tape.also_saves(Tensor(-1, (width,), self.parameters))
        return y

    def composite_rms_norm(
        self,
        x: Tensor,
        module: str,
        width: str,
        *,
        weight: bool = True,
        out: Shape | None = None,
        named: bool = False,
        second: bool = False,
    ) -> Tensor:
        """RMSNorm as separate operators: in fp32, then weight * normed in the input's dtype.

        LlamaRMSNorm of transformers, and torch.nn.RMSNorm before torch 2.9 (ATen native/layer_norm.cpp).

        Args:
            x: the input.
            module: name of the norm.
            width: axis of the weight.
            weight: whether the norm has a weight.
            out: axes of the result, where they differ from those of x.
            named: whether a Python variable references the fp32 product until the norm returns.
            second: whether the weight is the second factor.
        """
        wide = self.cast(x, "fp32", f"{module} input in fp32")
        variance, product = self.normed_with_variance(wide, module, None if weight else out)
        normed = self.cast(product, x.dtype, f"{module} normed")
        y = self.times_weight(normed, module, width, out, second=second) if weight else normed
        if named:
            self.tape.still_referenced(x, variance, product)
        return y

    def normed_in_fp32(self, x: Tensor, module: str) -> Tensor:
        """x / sqrt(mean(x^2) + eps), as separate operators."""
        return self.normed_with_variance(self.cast(x, "fp32", f"{module} input in fp32"), module, None)[1]

    def normed_with_variance(self, wide: Tensor, module: str, out: Shape | None) -> tuple[Tensor, Tensor]:
        """Return the mean of the squares of x, and x divided by its square root."""
        variance = self.mean(self.pow(wide, f"{module} squares"), f"{module} variance")
        shifted = self.shift(variance, f"{module} variance + eps")
        deviation = self.rsqrt(shifted, f"{module} reciprocal deviation")
        return variance, self.mul(wide, deviation, f"{module} normed in fp32", out, reduces=True)

    def rsqrt(self, x: Tensor, name: str) -> Tensor:
        """1 / sqrt(x); saves its output. Backward is -0.5 * gradient * output^3, each product a tensor."""
        y = self.pointwise(x, name, saves="output")
        node = self.tape.nodes[-1]
        if node.gradients[0] is not None:
            names = (f"{name}: cube", f"{name}: half the gradient")
            made = [self.tape.store(each, y.shape, y.dtype, DERIVATIVES) for each in names]
            node.backward = node.backward._replace(prepares=tuple((index, 1) for index in made))
        return y

    def mean(self, x: Tensor, name: str) -> Tensor:
        """The mean over the last axis; saves nothing. Its gradient is expanded into a new tensor."""
        return self.result(name, x.shape[:-1], x.dtype, (x,), (), (NEW,))

    def minus_rows(self, x: Tensor, rows: Tensor, name: str) -> Tensor:
        """x minus one number per row; saves nothing. The rows' gradient is first as large as x, then summed."""
        return self.result(name, x.shape, x.dtype, (rows, x), (), (REDUCED, SAME))

    def slices(self, x: Tensor, shapes: tuple[Shape, ...], name: str) -> tuple[Tensor, ...]:
        """Separate slices as views: the gradient of each is a tensor of zeros as large as x, with one part filled."""
        parts = tuple(Tensor(x.storage, shape, x.dtype) for shape in shapes)
        for index, part in enumerate(parts):
            self.tape.record(Node(f"{name} slice {index}", (x,), (part,), (), (NEW,)))
        return parts

    def scale(self, x: Tensor, name: str) -> Tensor:
        """x times (or plus) a number; saves nothing."""
        return self._unary(x, name, saves_input=False)

    def shift(self, x: Tensor, name: str, dtype: str = "") -> Tensor:
        """x plus a number or a tensor of `dtype` without gradient: a new tensor; the gradient is passed on unchanged.

        The gradient is cast where the sum has another dtype.
        """
        y = self.tape.new(name, x.shape, wider(x.dtype, dtype or x.dtype), DERIVATIVES)
        self.tape.record(Node(name, (x,), (y,), (), (SAME if x.dtype == y.dtype else NEW,)))
        return y

    def pow(self, x: Tensor, name: str) -> Tensor:
        """x to a power; saves x. It is on autocast's fp32 list.

        Backward is gradient * (exponent * x^(exponent - 1)); both products are tensors that live until its end
        (torch 2.13 torch/csrc/autograd/FunctionsManual.cpp, pow_backward).
        """
        y = self.pointwise(self.cast(x, "fp32") if self.autocast else x, name)
        self.tape.still_referenced(x)  # the caller's argument; its cast is created inside
        node = self.tape.nodes[-1]
        factors = (f"{name}: the lower power", f"{name}: times the exponent")
        prepared = tuple(
            (self.tape.store(factor, y.shape, y.dtype, "torch 2.13 FunctionsManual.cpp, pow_backward"), 1)
            for factor in factors
            if node.gradients[0] is not None
        )
        node.backward = node.backward._replace(prepares=prepared)
        return y

    def pointwise(self, x: Tensor, name: str, *, saves: str = "input") -> Tensor:
        """gelu, silu, relu, tanh, ...; saves its input or its output."""
        y = self.tape.new(name, x.shape, x.dtype, DERIVATIVES)
        saved = x if saves == "input" else y
        self.tape.record(Node(name, (x,), (y,), (saved.storage,), (NEW,), variables=(saved,)))
        return y

    def dropout(self, x: Tensor, name: str, rate: float) -> Tensor:
        """Dropout; saves a mask of one byte per element (native_dropout). No operator at rate 0."""
        if rate == 0:
            return x
        y = self.tape.new(f"{name} output", x.shape, x.dtype, "ATen native/cuda/Dropout.cu")
        mask = self.tape.store(f"{name} mask", x.shape, "bool", "ATen native/cuda/Dropout.cu: a bool mask is saved")
        self.tape.record(Node(name, (x,), (y,), (mask,), (NEW,), forward=ForwardMemory(also=(mask,), first=(mask,))))
        return y

    def copy(self, x: Tensor, name: str, shape: Shape | None = None, *, reorders: bool = False) -> Tensor:
        """A contiguous (or expanded) copy. Backward passes the gradient on, or sums it where axes were expanded.

        Args:
            x: the tensor.
            name: name of the copy.
            shape: axes of an expanded copy.
            reorders: whether the operator before needs its gradient contiguous in its own axis order: a further copy.
        """
        same = (shape is None or shape == x.shape) and not reorders
        return self.result(name, shape or x.shape, x.dtype, (x,), (), (SAME if same else NEW,), citation="aten::clone")

    def restrided_view(self, x: Tensor, name: str) -> Tensor:
        """A view; its gradient has other strides than x's gradient must have, so backward copies it."""
        y = Tensor(x.storage, x.shape, x.dtype)
        self.tape.record(Node(f"{name} by head", (x,), (y,), (), (NEW if x.grad else None,)))
        return y

    def expanded(self, x: Tensor, name: str, shape: Shape) -> Tensor:
        """A view of x repeated along axes; backward sums its gradient over them."""
        y = Tensor(x.storage, shape, x.dtype)
        self.tape.record(Node(name, (x,), (y,), (), (NEW if x.grad else None,)))
        return y

    def viewed(self, x: Tensor, shape: Shape, name: str) -> Tensor:
        """A view with other axes; its gradient is passed on as a view of the same memory."""
        y = Tensor(x.storage, shape, x.dtype, flat=x.flat)
        self.tape.record(Node(name, (x,), (y,), (), (ALIAS,)))
        return y

    def broadcast_add(self, x: Tensor, rows: Tensor, name: str) -> Tensor:
        """x + rows; the gradient of rows that are shared by all sequences is a sum over the batch."""
        if rows.shape == x.shape:
            return self.add(x, rows, name)
        dtype = wider(x.dtype, rows.dtype)
        return self.result(name, x.shape, dtype, (x, rows), (), (SAME if x.dtype == dtype else NEW, NEW))

    def gather(
        self,
        x: Tensor,
        out: Shape,
        name: str,
        padded: Shape | None = None,
        *,
        values: bool = False,
        index: Tensor | None = None,
    ) -> Tensor:
        """Select rows of x; saves their indices, 8 bytes each.

        Args:
            x: the tensor to select from.
            out: axes of the result.
            name: name of the result.
            padded: axes of the result with rows rounded up.
            values: whether single values along the last axis are selected (aten::gather); its gradient formula also
                names x.
            index: the indices, if they exist already; None: they are created here.
        """
        tape = self.tape
        y = tape.new(name, out, x.dtype, "aten::gather" if values else "aten::index")
        tokens = out[:-1] if len(out) > 3 else out
        made: tuple[int, ...] = ()
        if index is None:
            made = (tape.store(f"{name} indices", tokens, "int64", "aten::index saves its indices"),)
        indices = made if index is None else (index.storage,)
        saved = (*((x.storage,) if values else ()), *indices)
        tape.record(Node(name, (x,), (y,), saved, (NEW,), forward=ForwardMemory(also=made)))
        return y if padded is None else self.copy(y, f"{name}, rounded up", padded)

    def scattered(self, x: Tensor, out: Shape, name: str, *, in_place: bool = True) -> Tensor:
        """Add rows into fewer rows (index_add); backward gathers them.

        Saves the source rows, though only for their shape: index_add's gradient formula names its source.

        Args:
            x: the source rows.
            out: axes of the sums.
            name: name of the sums.
            in_place: whether the zeros become the sums; otherwise they are copied and freed.
        """
        zeros = () if in_place else (self.table(f"zeros for {name}", out, x.dtype, "aten::zeros_like"),)
        y = self.tape.new(name, out, x.dtype, "aten::index_add")
        self.tape.record(Node(name, (x, *zeros), (y,), (x.storage,), (NEW, *(None for _ in zeros))))
        self.tape.also_saves(Tensor(-1, x.shape[:-1], "int64"))  # the target row of each source row
        return y

    def also_save(self, y: Tensor, name: str, shape: Shape, dtype: str) -> None:
        """Make the operator that produced y save an additional small tensor without gradient."""
        node = next(node for node in reversed(self.tape.nodes) if y in node.outputs)
        extra = self.tape.store(name, shape, dtype, DERIVATIVES)
        node.saved += (extra,)
        node.forward = node.forward._replace(also=(*node.forward.also, extra))

    def softmax(self, x: Tensor, name: str, dtype: str = "") -> Tensor:
        """Softmax; saves its output. Backward needs a temporary of the same size (gradient * output).

        `dtype`: the dtype it is called with; default: the input's, or fp32 under autocast, where it is on the fp32
        list. For fp16 input the kernel computes fp32 itself, and fp16 in backward (torch 2.13 ATen native/SoftMax.cpp,
        half_to_float).
        """
        wide = dtype or ("fp32" if self.autocast else x.dtype)
        if x.dtype != "fp16":
            x = self.cast(x, wide)
        y = self.tape.new(name, x.shape, wide, DERIVATIVES)
        product = self.tape.store(f"{name} gradient times output", x.shape, wide, "ATen native/cuda/SoftMax.cu")
        self.tape.record(Node(name, (x,), (y,), (y.storage,), (NEW,), backward=BackwardMemory(temporaries=(product,))))
        return y

    def safe_softmax(self, x: Tensor, name: str) -> Tensor:
        """Softmax with rows of zeros where all inputs are -inf; masks of such inputs and rows are temporary.

        Source: torch 2.13 ATen native/transformers/attention.cpp, _safe_softmax.
        """
        y = self.softmax(x, name)
        masks = tuple(
            self.tape.store(f"{name}: {what} of -inf", shape, "bool", "ATen native/transformers/attention.cpp")
            for what, shape in (("inputs", x.shape), ("rows", x.shape[:-1]))
        )
        node = self.tape.nodes[-1]
        node.forward = node.forward._replace(temporaries=masks)
        return y

    def matmul(
        self,
        a: Tensor,
        b: Tensor,
        name: str,
        out: Shape,
        copies: tuple[str, str] = ("", ""),
        *,
        expands: Shape = (),
    ) -> Tensor:
        """Batched a @ b; saves each factor if the other one requires a gradient. Autocast casts b first.

        Args:
            a: the first factor.
            b: the second factor.
            name: name of the product.
            out: its axes.
            copies: names of the factors' copies, where their matrices are not contiguous.
            expands: axes of the view that repeats b for each matrix of a, where it does.
        """
        if self.autocast:
            b, a = self.cast(b, self.compute), self.cast(a, self.compute)
        given = (a, b)
        b = self.expanded(b, f"{name}: second factor, repeated", expands) if expands else b
        a, b = (self.copy(each, copy) if copy else each for each, copy in zip((a, b), copies, strict=True))
        y = self.tape.new(name, out, a.dtype, "aten::bmm")
        saved = tuple(factor for factor, partner in ((a, b), (b, a)) if partner.grad)
        storages = tuple(factor.storage for factor in saved)
        # bmm_backward: gradient of mat2 before self
        self.tape.record(Node(name, (b, a), (y,), storages, (NEW, NEW), variables=saved))
        self.tape.still_referenced(*given)
        return y

    def split(self, x: Tensor, shapes: tuple[Shape, ...], name: str) -> tuple[Tensor, ...]:
        """Views of one tensor with separate gradients; backward concatenates these into one new tensor."""
        parts = tuple(Tensor(x.storage, shape, x.dtype, strided=True) for shape in shapes)
        self.tape.record(Node(name, (x,), parts, (), (NEW,)))
        return parts

    def concatenate(self, parts: tuple[Tensor, ...], out: Shape, name: str) -> Tensor:
        """Concatenate tensors into a new one; the gradients of the parts are views of its gradient."""
        dtype = "fp32" if any(part.dtype == "fp32" for part in parts) else parts[0].dtype
        kinds = tuple(SAME if part.dtype == dtype else NEW for part in parts)
        return self.result(name, out, dtype, parts, (), kinds, citation="aten::cat")

    def _unary(self, x: Tensor, name: str, *, saves_input: bool) -> Tensor:
        return self.result(name, x.shape, x.dtype, (x,), (x.storage,) if saves_input else (), (NEW,))
