"""The MLP of the reference decoder: dense, or routed experts."""

from __future__ import annotations

from memcalc.architectures.plain_base import PlainModule
from memcalc.architectures.structure import BlockStructure
from memcalc.operators import Operators
from memcalc.programs.tape import Tensor


class PlainMlp(PlainModule):
    """Writer of the MLP of a layer."""

    def output(self, x: Tensor) -> Tensor:
        """The MLP: dense, or routed experts."""
        x = self.split.module_input(x, "mlp")
        if self.layer.experts:
            return self.routed(x)
        return self.dense(x, "mlp.", self.c.mlp.width)

    def dense(self, x: Tensor, prefix: str, width: str) -> Tensor:
        """Up (and gate) projection, activation, down projection."""
        c, inner = self.c, self.axis(width)
        weight, into = (inner, "d"), ("b", "s", inner)
        gate = None
        if c.mlp.gated and c.implementation == "huggingface":  # down(act(gate(x)) * up(x)), without variables
            kind = f"{prefix}{'silu' if c.mlp.activation == 'swiglu' else 'gelu'}"
            if c.mlp.fused_gate_up:
                both = ("b", "s", f"2·{inner}")
                gate = up = self.split.column(x, f"{prefix}gate_up_proj", (both[-1], "d"), both, bias=c.mlp.bias)
                gate = Tensor(gate.storage, into, gate.dtype, grad=False)
            else:
                gate = self.split.column(x, f"{prefix}gate_proj", weight, into, bias=c.mlp.bias)
            gate = self.ops.pointwise(gate, kind)
            if not c.mlp.fused_gate_up:
                up = self.split.column(x, f"{prefix}up_proj", weight, into, bias=c.mlp.bias)
            product = self.ops.mul(gate, up, f"{kind}(gate) * up")
            self.split.returned(*((up,) if c.mlp.fused_gate_up else ()))
            out = self.split.row(product, f"{prefix}down_proj", ("d", inner), bias=c.mlp.bias)
            self.split.returned(x)
            return out
        if c.mlp.gated:
            gate = self.split.column(x, f"{prefix}gate_proj", weight, into, bias=c.mlp.bias)
        up = self.split.column(x, f"{prefix}up_proj", weight, into, bias=c.mlp.bias)
        product = self.activated(up, gate, prefix)
        out = self.split.row(product, f"{prefix}down_proj", ("d", inner), bias=c.mlp.bias)
        self.split.returned(x, *(() if gate is None else (gate,)))
        return out

    def activated(self, up: Tensor, gate: Tensor | None, prefix: str) -> Tensor:
        """gelu(up), relu(up), or silu(gate) * up."""
        ops = self.ops
        if gate is not None:
            kind = "silu" if self.c.mlp.activation == "swiglu" else "gelu"
            return ops.mul(ops.pointwise(gate, f"{prefix}{kind}"), up, f"{prefix}{kind}(gate) * up")
        if self.c.mlp.activation == "relu2":
            squared = ops.pow(ops.pointwise(up, f"{prefix}relu", saves="output"), f"{prefix}relu²")
            self.tape.still_referenced(up)
            return squared
        return ops.pointwise(
            up, f"{prefix}{self.c.mlp.activation}", saves="output" if self.c.mlp.activation == "relu" else "input"
        )

    def routed(self, x: Tensor) -> Tensor:
        """Top-k experts with balanced routing (memcalc/step/reference/mlp.py)."""
        c, ops = self.c, self.ops
        if c.implementation == "huggingface":
            return self.with_shared_expert(x, grouped_products(ops, c, x))
        experts = "E/e" if c.sharding.expert_parallel else "E"
        given, x = x, ops.flattened(x, "tokens")
        copies, rows = ("b", "s", "k", "d"), (experts, "R")
        inner, bias = f"F_e{c.sharding.expert_suffix}", c.experts.bias
        router = ops.linear(x, "mlp.router", ("E", "d"), ("b", "s", "E"), bias=c.experts.router_bias)
        probabilities = ops.softmax(ops.cast(router, "fp32"), "router probabilities")
        ranked = probabilities
        if c.experts.router_correction:
            ranked = ops.table("corrected probabilities", probabilities.shape, "fp32", of=(probabilities,))
        chosen = ops.largest(ranked, copies[:-1], "chosen experts")
        weights = ops.gather(probabilities, copies[:-1], "router weights", values=True, index=chosen)
        weights = self.normalized(weights, probabilities, ranked)
        _, order = ops.sorted_order(chosen, "order of token copies")
        source = ops.table("source of each copy", copies[:-1], "int64", "aten::floor_divide", of=(order,))
        permuted = ops.rows_at(x, source, copies, "permuted tokens", x.shape[:-1])
        permuted = ops.copy(permuted, "permuted tokens, rounded up", (*rows, "d"))
        gate = None
        if c.mlp.gated:
            gate = ops.batched_linear(permuted, "mlp.experts.gate", (experts, "d", inner), (*rows, inner), bias=bias)
        up = ops.batched_linear(permuted, "mlp.experts.up", (experts, "d", inner), (*rows, inner), bias=bias)
        product = self.activated(up, gate, "mlp.experts.")
        done = ops.batched_linear(product, "mlp.experts.down", (experts, inner, "d"), (*rows, "d"), bias=bias)
        self.tape.still_referenced(*(() if gate is None or c.cache is not None else (gate,)))
        done_copies = ops.slices(done, (copies,), "expert outputs of the copies")[0]
        permuted_weights = ops.rows_at(weights, order, copies[:-1], "permuted router weights", copies[:-1])
        permuted_weights = ops.cast(permuted_weights, done.dtype)
        weighted = ops.mul(done_copies, permuted_weights, "weighted expert outputs", reduces=True)
        summand = ("b", "s" if c.sharding.dtensor else self.layer.stream, "d")
        added = ops.scattered(weighted, summand, "sum of experts", in_place=False)
        total = self.split.summed(added, "sum of experts")
        y = self.with_shared_expert(x, total)
        y = ops.viewed(y, given.shape, "sum of experts by sequence")
        if c.cache is None:  # until the module returns; a server's kernel in generation has no such variables
            self.tape.still_referenced(weights, chosen, order, source, permuted, done, weighted)
        return y

    def normalized(self, weights: Tensor, *named: Tensor) -> Tensor:
        """Router weights over their sum; variables reference them, and `named`, until the router returns."""
        ops = self.ops
        normalized = ops.divide(weights, ops.total(weights, "sum of router weights"), "normalized router weights")
        self.tape.still_referenced(weights, *named)
        return normalized

    def with_shared_expert(self, x: Tensor, total: Tensor) -> Tensor:
        """Add the shared expert's output to that of the routed experts."""
        c, ops = self.c, self.ops
        if not c.experts.shared:
            return total
        common = self.dense(x, "mlp.shared_experts.", "F_s")
        if c.experts.shared_gate:
            gate = ops.linear(x, "mlp.shared_expert_gate", ("1", "d"), ("b", "s", "1"), bias=False)
            gate = ops.pointwise(gate, "shared gate", saves="output")
            common = ops.weigh(common, gate, "gated shared expert", first=True)
        return ops.add(total, common, "sum with shared expert")


# Routed experts as transformers runs them in generation: one grouped GEMM for all experts, forward only.
# Source: transformers 5.23 integrations/moe.py, grouped_mm_experts_forward; models/olmoe/modeling_olmoe.py,
# TopKRouter. Its Python variables reference their tensors until the function returns.

# families with fp32 router weights, so their products are fp32 (modeling_<family>.py)
WIDE_WEIGHTS = ("deepseek_v2", "deepseek_v3", "glm4_moe", "minimax_m2")


def grouped_products(ops: Operators, c: BlockStructure, x: Tensor) -> Tensor:
    """Route each token to k experts: k copies, sorted by expert, through both GEMMs, restored and summed."""
    copies, tape = ("b", "s", "k"), ops.tape
    logits = ops.linear(x, "mlp.router", ("E", "d"), ("b", "s", "E"), bias=c.experts.router_bias)
    probabilities = ops.softmax(ops.cast(logits, "fp32"), "router probabilities")
    weights = ops.gather(probabilities, copies, "router weights")
    selected = ops.gather(x, (*copies, "d"), "tokens by expert")
    inner = "2·F_e" if c.mlp.gated else "F_e"
    up = ops.batched_linear(selected, "mlp.experts.up", ("E", inner, "d"), (*copies, inner), bias=False)
    product = ops.pointwise(Tensor(up.storage, (*copies, "F_e"), up.dtype, grad=False), "mlp.experts.activation")
    if c.mlp.gated:
        product = ops.mul(product, up, "mlp.experts.activation(gate) * up", (*copies, "F_e"))
        tape.still_referenced(up)
    down = ops.batched_linear(product, "mlp.experts.down", ("E", "d", "F_e"), (*copies, "d"), bias=False)
    scales = weights if c.family in WIDE_WEIGHTS else ops.cast(weights, down.dtype)
    weighted = ops.mul(down, scales, "weighted expert outputs")
    ordered = ops.copy(weighted, "weighted expert outputs by token")
    total = ops.cast(ops.scattered(ordered, ("b", "s", "d"), "sum of experts"), down.dtype)
    tape.still_referenced(x, logits, probabilities, weights, selected, down)
    return total
