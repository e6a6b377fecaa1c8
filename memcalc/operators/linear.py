"""Linear layers and embeddings."""

from __future__ import annotations

from typing import TypedDict

from memcalc.ledger.component import Component
from memcalc.operators.base import DERIVATIVES, TIED_SUM, Base, wider
from memcalc.programs import operator_workspaces
from memcalc.programs.tape import (
    NEW,
    SAME,
    SUMMED,
    VIEW,
    BackwardMemory,
    DeferredGradients,
    ForwardMemory,
    Node,
    Shape,
    Tensor,
)


class LinearOptions(TypedDict, total=False):
    """Optional arguments of `Linear.linear`, for subclasses that override it."""

    row: bool
    tied: bool
    conv1d: bool
    apart: bool


class Linear(Base):
    """Linear layers and embeddings."""

    def linear(
        self,
        x: Tensor,
        module: str,
        weight: Shape,
        out: Shape,
        *,
        bias: bool,
        row: bool = False,
        tied: bool = False,
        conv1d: bool = False,
        apart: bool = False,
    ) -> Tensor:
        """y = x W^T + b. Saves x (and W, which is no new memory); backward produces dx, dW and db.

        With a frozen W, x is not saved, as only dW needs it (see `Adapters.saves_inputs`), but W is, for dx. db is a
        sum over all tokens, see `workspaces.column_sum`. Under sequence parallelism a column-parallel layer gathers its
        input, and saves only the rank's part; a row-parallel layer reduce-scatters its output.

        Args:
            x: the input.
            module: name of the module with the parameters `weight` and `bias`.
            weight: axes of the weight, [out, in].
            out: axes of the output.
            bias: whether there is a bias.
            row: whether tensor parallelism shards the input axis.
            tied: whether the weight is the embedding's; its gradient then waits for the embedding's.
            conv1d: whether the weight is stored as [in, out] (transformers' GPT-2).
            apart: whether a separate operator adds the bias, in its own dtype (transformers' Falcon).
        """
        if bias and apart:
            product = Linear.linear(self, x, module, weight, out, bias=False, row=row, tied=tied, conv1d=conv1d)
            total = self.plus_bias(product, module, weight[0], wider(product.dtype, self.parameters))
            self.tape.still_referenced(x, product)
            return total
        given, tape, trains = x, self.tape, self.trains(module)
        operand = self.weight_operand(module, weight, tied=tied)
        dtype = self.compute if self.autocast else x.dtype
        casts: list[Tensor] = []
        parameters: list[int] = []
        sums: list[tuple[int, int]] = []
        # Autocast casts the last argument first, in the compilers' evaluation order (ATen autocast_mode.h,
        # cached_cast(...)...): of linear(x, weight, bias), and of addmm(bias, x, weight).
        shapes = {"bias": weight[:1], "weight": weight} if bias else {"weight": weight}
        for tensor in ("weight", "input", "bias") if conv1d else ("bias", "weight", "input"):
            if tensor == "input":
                x = self.autocast_input(x, module)
            if tensor not in shapes:
                continue
            if tensor == "weight" and operand is not None:
                casts.insert(0, self.cast(operand, dtype, f"{module}.weight in {dtype}"))
                continue
            at = len(casts) if tensor == "bias" else 0  # the weight's before the bias's
            if not trains:
                casts[at:at] = (
                    [] if self.parameters == dtype else [self.cast_weight(module, tensor, shapes[tensor], None)]
                )
                continue
            gradient = self.parameter_gradient(module, tensor, shapes[tensor], self.parameters)
            if tied and tensor == "weight":
                tape.gradients.deferred.add(gradient)
                tape.gradients.tied = gradient
            if self.parameters == dtype:
                parameters.insert(len(parameters) if tensor == "bias" else 0, gradient)
            else:
                casts.insert(at, self.cast_weight(module, tensor, shapes[tensor], gradient))
        y = tape.new(f"{module} output", out, dtype, "torch.nn.functional.linear")
        gathered = self._gathered(x, module) if not row else self._gathered(Tensor(-1, out, x.dtype), module)
        of_bias = parameters if operand is not None else parameters[1:]
        if bias and trains:
            # Input or output may be split into heads; the leading axes of the other one are the tokens.
            leading = min(x.shape[:-1], out[:-1], key=len)
            tokens = tuple("s" if axis == "s/t" else axis for axis in leading)
            sums += ((index, 1) for index in of_bias)
            sums += self.column_sum(module, "bias", tokens, (weight[0],))
        # transformers' Conv1D calls torch.addmm (pytorch_utils.py), which DeepSpeed does not replace.
        replaced = self.replaced_linears and not conv1d
        saves = self.adapters is not None and self.adapters.saves_inputs and not conv1d
        keeps = trains or (x.grad and saves)
        seen = Tensor(casts[0].storage if casts else -1, weight, dtype, strided=not conv1d)
        of_x = NEW if given.flat or replaced else VIEW
        input_first = bias or replaced
        kinds = (of_x, *(NEW, SUMMED)[: len(casts)]) if input_first else (*(NEW for _ in casts), of_x)
        node = Node(
            module,
            # addmm and DeepSpeed's linear layer compute dx first, mm dW (derivatives.yaml, in order of names)
            (x, *casts) if input_first else (*casts, x),
            (y,),
            # the weight's cast for dx, x for the weight gradient; no gradient needs the bias
            (*((x.storage,) if keeps else ()), *(cast.storage for cast in casts[:1] if x.grad)),
            # With more than two axes dx is a view of a matrix (ATen native/Linear.cpp, _flatten_nd_linear).
            kinds,
            referenced_by_caller=(given.storage,),
            forward=ForwardMemory(temporaries=gathered),
            backward=BackwardMemory(
                temporaries=gathered,
                summed=tuple(of_bias),
                summed_later=tuple(sums),
                parameters_first=not input_first,
                reversed_accumulation=True,
                input_viewed_first=bool(of_bias),
            ),
            parameters=tuple(parameters),
            keeps_weight=not trains,
            variables=(*((x,) if trains else ()), *((seen,) if x.grad else ())),
            module=module,
            multiplies=True,
        )
        tape.record(node, trains=trains)
        return y

    def weight_operand(self, module: str, weight: Shape, *, tied: bool) -> Tensor | None:  # noqa: ARG002 -- of subclasses
        """Return the matrix that a linear layer multiplies with, if operators compute it from its weight."""
        return None

    def plus_bias(self, x: Tensor, module: str, width: str, dtype: str) -> Tensor:
        """Add a parameter of the last axis to x, into a new tensor; saves nothing."""
        trains, same = self.trains(module), x.dtype == dtype
        y = self.tape.new(f"{module} output with bias", x.shape, dtype, DERIVATIVES)
        gradients: tuple[int, ...] = ()
        sums: tuple[tuple[int, int], ...] = ()
        if trains:
            gradients = (self.parameter_gradient(module, "bias", (width,), self.parameters),)
            tokens = tuple("s" if axis == "s/t" else axis for axis in x.shape[:2])
            sums = ((gradients[0], 1), *self.column_sum(module, "bias", tokens, (width,)))
        kind = SAME if same else NEW
        node = Node(
            f"{module} bias",
            (x,),
            (y,),
            (),
            (kind,),
            parameters=gradients,
            backward=BackwardMemory(summed=gradients, summed_later=sums),
        )
        self.tape.record(node)
        return y

    def _gathered(self, x: Tensor, module: str) -> tuple[int, ...]:
        """A buffer for the full sequence of a sequence-parallel tensor (Korthikanti et al. section 4.2.2)."""
        if "s/t" not in x.shape:
            return ()
        whole = tuple("s" if axis == "s/t" else axis for axis in x.shape)
        citation = "Korthikanti et al. (arXiv 2205.05198) section 4.2.2: gathered in forward and again in backward"
        name = f"{module} gathered sequence"
        return (self.tape.store(name, whole, x.dtype, citation, component=Component.COMMUNICATION_BUFFERS),)

    def batched_linear(self, x: Tensor, module: str, weight: Shape, out: Shape, *, bias: bool) -> Tensor:
        """One matmul per expert: bmm, or baddbmm with a bias. Saves x; backward produces dx, dW and db.

        Autocast casts the last argument first, as in `linear`: of `baddbmm(bias, x, weight)` the weight, x, the bias.
        """
        trains, dtype = self.trains(module), self.compute if self.autocast else x.dtype
        shapes = {"weight": weight, "bias": (weight[0], weight[2])} if bias else {"weight": weight}
        gradients: dict[str, int] = {}
        if trains:
            gradients = {name: self.parameter_gradient(module, name, s, self.parameters) for name, s in shapes.items()}
        temporaries: tuple[int, ...] = ()
        if bias and trains:
            rule = operator_workspaces.named(operator_workspaces.column_sum, rows=out[1:2], columns=shapes["bias"])
            sums = self.tape.store(f"{module} bias sum", (), "uint8", "ATen native/cuda/Reduce.cuh", rule=rule)
            temporaries = (sums,)
        casts: list[Tensor] = []
        for name, shape in shapes.items():
            if name == "bias":
                x = self.autocast_input(x, module)
            if self.parameters != dtype:
                casts.append(self.cast_weight(module, name, shape, gradients.get(name)))
        x = self.autocast_input(x, module)  # cast here if there was no bias
        y = self.tape.new(f"{module} output", out, dtype, "aten::baddbmm" if bias else "aten::bmm")
        seen = Tensor(casts[0].storage if casts else -1, weight, dtype)
        inputs = (x, *casts) if bias else (*casts, x)  # order of batch1, batch2, self; or of mat2 before self
        node = Node(
            module,
            inputs,
            (y,),
            # as in `linear`
            (*((x.storage,) if trains else ()), *(cast.storage for cast in casts[:1] if x.grad)),
            # torch.matmul views the matrices of bmm
            (NEW,) * len(inputs) if bias else (*(NEW for _ in casts), VIEW),
            backward=BackwardMemory(
                temporaries=temporaries,
                reversed_accumulation=True,
                input_viewed_first=not bias,
                parameters_first=not bias,
            ),
            parameters=() if casts else tuple(gradients.values()),
            keeps_weight=not trains,
            variables=(*((x,) if trains else ()), *((seen,) if x.grad else ())),
            module=module,
            multiplies=True,
        )
        self.tape.record(node)
        return y

    def unwritten_parameter(self, module: str, tensor: str, shape: Shape) -> None:
        """A parameter without operators on the tape: only its gradient is recorded."""
        if not self.trains(module):
            return
        gradient = self.parameter_gradient(module, tensor, shape, self.parameters)
        self.tape.record(Node(module, (), (), (), (), parameters=(gradient,), module=module))

    def embedding(
        self,
        module: str,
        table: Shape,
        tokens: Shape,
        *,
        tied: bool = False,
        counts: bool = False,
        index: Tensor | None = None,
        view: bool = True,
        copies_gradient: bool = False,
    ) -> Tensor:
        """Look up rows of an embedding; saves the indices, which are the inputs. The weight gradient is dense.

        Args:
            module: its name.
            table: axes of the weight, [rows, size].
            tokens: axes of the indices.
            tied: whether the LM head shares the weight.
            counts: whether the indices are positions created in this forward; saving them is then new memory.
            index: the indices, if this forward has created them before.
            view: whether a tied LM head's gradient is a view of a matmul's result.
            copies_gradient: whether the gradient of the result is not contiguous, so that backward copies it.
        """
        tape = self.tape
        y = tape.new(f"{module} output", (*tokens, table[1]), self.parameters, "torch.nn.functional.embedding")
        if not self.trains(module):
            indices = tape.store(f"{module} indices", tokens, "int64", DERIVATIVES)
            given = () if index is None else (index,)
            made = (indices,) if counts else ()
            node = Node(
                module,
                given,
                (y,),
                (),
                (None,) * len(given),
                forward=ForwardMemory(also=made, first=made),
                module=module,
            )
            tape.record(node)
            # torch.Tensor.requires_grad_ on the output makes it a leaf, and its gradient is discarded.
            y.grad = module == "embed_tokens" and self.adapters is not None and self.adapters.input_gradient
            if y.grad:
                tape.leaves[y.storage] = node
            return y
        rule = operator_workspaces.named(
            operator_workspaces.embedding_backward, tokens=tokens, rows=table[0], width=table[1]
        )
        scratch = tape.store(f"{module} sums", (), "uint8", "ATen native/cuda/Embedding.cu", rule=rule)
        indices = self.sorted_indices(module, tokens, table[0])
        gradient = self.parameter_gradient(module, "weight", table, self.parameters)
        temporaries: tuple[int, ...] = (scratch,)
        parameters: tuple[int, ...] = (gradient,)
        sums: tuple[tuple[int, ...], ...] = ()
        if tied:
            # The LM head's gradient waits for this one. It is a transposed view of a matmul's result, so the sum is a
            # third tensor. Under autocast it is a cast of that view without other references, so the sum is accumulated
            # in place; the same holds for the sum over several chunks and for the gradient of a fused loss.
            citation = "torch 2.13 autograd/input_buffer.cpp: a shared leaf's gradients are summed out of place"
            part = tape.store(f"{module} gradient before the sum", table, self.parameters, citation)
            tape.gradients.deferred.add(part)
            parameters, sums = (part,), ((part, part),)  # freed once it is added
            if view and not (self.autocast and self.parameters != self.compute):
                total = tape.store(f"{module} {TIED_SUM}", table, self.parameters, citation)
                sums = ((total, part, total),)
                tape.gradients.tied_sum = total  # replaces the LM head's gradient from here on
            tape.gradients.arrives_summed = gradient
        copies: tuple[tuple[int, int], ...] = ()
        if copies_gradient:
            copies = ((tape.store(f"gradient of {module} output in order", y.shape, y.dtype, DERIVATIVES), 1),)
        kept: tuple[int, ...] = ()
        if counts:
            kept = (tape.store(f"{module} indices", tokens, "int64", DERIVATIVES, component=Component.TEMPORARIES),)
        node = Node(
            module,
            () if index is None else (index,),
            (y,),
            kept if index is None else (index.storage,),
            () if index is None else (None,),
            forward=ForwardMemory(also=kept, first=kept),
            backward=BackwardMemory(prepares=(*copies, (indices, 1)), temporaries=temporaries),
            parameters=parameters,
            deferred=DeferredGradients(sums=sums),
            variables=(Tensor(-1, tokens, "int64"),),
            module=module,
        )
        tape.record(node, trains=True)
        return y
