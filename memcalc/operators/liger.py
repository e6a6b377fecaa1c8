"""Liger's kernels for norms, RoPE, gated MLPs and the loss (liger-kernel 0.8, arXiv 2410.10989)."""

from __future__ import annotations

from memcalc.operators.base import Base
from memcalc.programs import operator_workspaces
from memcalc.programs.tape import IN_PLACE, SAME, BackwardMemory, ForwardMemory, Node, Shape, Tensor

SOURCE = "liger-kernel 0.8 ops/{}.py"
LOSS = SOURCE.format("fused_linear_cross_entropy")


class LigerKernels(Base):
    """Liger's kernels, which save their inputs and write gradients in place."""

    def liger_rms_norm(self, x: Tensor, module: str, width: str) -> Tensor:
        """RMSNorm; saves x and one reciprocal deviation per row. The input gradient overwrites the output gradient.

        The weight gradient is first summed per multiprocessor, in fp32.
        """
        tape, citation = self.tape, SOURCE.format("rms_norm")
        y = tape.new(f"{module} output", x.shape, x.dtype, citation)
        deviation = tape.store(f"{module} reciprocal deviation", x.shape[:-1], "fp32", citation)
        rule = operator_workspaces.named(operator_workspaces.liger_norm_backward, width=width)
        sums = tape.store(f"{module} sums by multiprocessor", (), "uint8", citation, rule=rule)
        trains = self.trains(module)
        gradients = (self.parameter_gradient(module, "weight", (width,), self.parameters),) if trains else ()
        node = Node(
            module,
            (x,),
            (y,),
            (x.storage, deviation),
            (SAME,),
            forward=ForwardMemory(also=(deviation,)),
            backward=BackwardMemory(temporaries=(sums,) if trains else ()),
            parameters=gradients,
            module=module,
        )
        weight = Tensor(-1, (width,), self.parameters)
        node.variables = (Tensor(x.storage, x.shape, x.dtype), weight, *tape.variables_of(node)[1:])
        tape.record(node)
        return y

    def liger_rope(self, x: Tensor, name: str) -> Tensor:
        """Apply RoPE in place, in backward too; saves the cos/sin cache."""
        turned = Tensor(x.storage, x.shape, x.dtype, grad=x.grad)
        self.tape.record(Node(f"rotated {name}", (x,), (turned,), (), (SAME,)))
        self.tape.also_saves(Tensor(-1, ("s", "d_h"), x.dtype))
        return turned

    def liger_swiglu(self, gate: Tensor, up: Tensor, name: str) -> Tensor:
        """silu(gate) * up without storing silu(gate); saves gate and up, which backward overwrites with gradients."""
        y = self.tape.new(name, up.shape, up.dtype, SOURCE.format("swiglu"))
        self.tape.record(Node(name, (gate, up), (y,), (gate.storage, up.storage), (IN_PLACE, IN_PLACE)))
        return y

    def fused_cross_entropy(self, x: Tensor, weight: Shape, *, tied: bool) -> None:
        """LM head and cross-entropy: forward computes both gradients, some rows of logits at a time.

        Backward returns the gradients. All chunks of rows but the first make the same requests, because autocast
        caches the cast of the weight.
        """
        tape = self.tape
        dtype = self.compute if self.autocast else x.dtype
        of_x = tape.store(f"gradient of {tape.storages[x.storage].name}", x.shape, x.dtype, LOSS)
        parameters: tuple[int, ...] = ()
        if self.trains("lm_head"):
            parameters = (self.parameter_gradient("lm_head", "weight", weight, self.parameters),)
            if tied:
                tape.gradients.deferred.update(parameters)
                (tape.gradients.tied,) = parameters
        made = (of_x, *parameters)
        losses = tape.store("loss of each token", ("b", "s"), "fp32", LOSS)
        mask = tape.store("tokens that count", ("b", "s"), "bool", LOSS)
        self._make("gradients and losses", *made, losses, mask)
        self._make("sum of tokens that count", tape.store("tokens that count in int64", ("b", "s"), "int64", LOSS))
        cached: list[int] = []
        for _ in range(2 if {x.dtype, self.parameters} != {dtype} else 1):  # without casts one buffer has all logits
            self._rows_of_logits(x, weight, dtype, cached)
        loss = tape.new("loss", (), "fp32", LOSS)
        node = Node("fused cross_entropy", (x,), (loss,), made, (IN_PLACE,), parameters=parameters)
        node.referenced_by_caller = (*made, losses, mask)
        tape.record(node)
        tape.hold(loss)

    def _rows_of_logits(self, x: Tensor, weight: Shape, dtype: str, cached: list[int]) -> None:
        """Compute the logits of some rows, and what they add to the gradients.

        `@` casts under autocast. To a gradient in fp32 or in the logits' dtype torch.addmm adds 16-bit logits without
        a product of the weight's size.

        Args:
            x: the hidden state.
            weight: shape of the LM head's weight.
            dtype: that of the logits.
            cached: casts in autocast's cache, to which the weight's is added.
        """
        tape, trains, rows = self.tape, self.trains("lm_head"), ("T_f", weight[1])
        name = f"lm_head.weight {{}} in {dtype}"

        def casts_of_rows() -> list[int]:
            return [] if x.dtype == dtype else [tape.store(f"rows in {dtype}", rows, dtype, LOSS)]

        transposed: list[int] = []
        if self.parameters != dtype:  # a view, of which no cast is cached
            transposed.append(tape.store(name.format("transposed"), weight, dtype, LOSS))
        logits = tape.store("logits of some rows", ("T_f", weight[0]), dtype, LOSS)
        rows_in_dtype = casts_of_rows()
        self._make("casts", *transposed, *rows_in_dtype)
        self._make("rows of logits", logits, reads=(*transposed, *rows_in_dtype))
        casts = [*cached]
        if self.parameters != dtype and not cached:
            casts = [tape.store(name.format("(autocast cache)"), weight, dtype, "ATen autocast_mode.cpp, cached_cast")]
            self._make("cast", *casts, reads=(logits,))
            if trains and self.parameters == "fp32" and self.caches_casts:
                cached += casts
                tape.live.region.update(casts)
        if {x.dtype, self.parameters} != {dtype}:  # else torch.mm writes to the gradient
            product = tape.store("gradient of some rows", rows, dtype, LOSS)
            self._make("gradient of some rows", product, reads=(logits, *casts))
        if trains:
            added = casts_of_rows()
            if dtype == "fp32" or self.parameters not in ("fp32", dtype):
                names = dict.fromkeys((dtype, "fp32"))
                added += [
                    tape.store(f"lm_head.weight gradient of some rows in {each}", weight, each, LOSS) for each in names
                ]
            self._make("gradient of lm_head.weight", *added, reads=(logits,))

    def _make(self, name: str, *storages: int, reads: tuple[int, ...] = ()) -> None:
        """Record an operator without a graph, of which nothing reads the storages unless a later one does."""
        node = Node(name, (), (), (), (), forward=ForwardMemory(also=storages))
        node.referenced_by_caller = reads
        self.tape.record(node)
