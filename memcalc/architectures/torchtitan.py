"""torchtitan's Llama, DeepSeek and Qwen3, operator by operator.

FSDP2 gathers parameters in 16 bits. Without it forward runs under autocast, or in fp32 with tensor or pipeline
parallelism. Before 0.2.2 attention gets keys and values for each query head (`repeat_kv`). Sources: torchtitan 0.2.2
torchtitan/models/llama3/model/model.py and qwen3/model/model.py, infra/parallelize.py (tensor parallelism),
distributed/utils.py (maybe_enable_amp), distributed/activation_checkpoint.py (selective recomputation by operator),
train.py (the logits are freed before backward).
"""

from __future__ import annotations

from memcalc.architectures.losses import write_loss
from memcalc.architectures.math_attention import math_attention
from memcalc.architectures.norms import norm
from memcalc.architectures.plain_embedding_head import split_embedding
from memcalc.architectures.structure import BlockStructure
from memcalc.architectures.tensor_parallel import TensorParallelOps
from memcalc.architectures.torchtitan_mla import TorchtitanLatentAttention
from memcalc.architectures.torchtitan_moe import TorchtitanMoe, kept_exchanges
from memcalc.ledger.component import Component
from memcalc.operators import Operators
from memcalc.programs.tape import Node, Tape, Tensor

SOURCE = "torchtitan 0.2.2 torchtitan/models/llama3/model/model.py"
# FSDP2 casts each unit's floating-point arguments: Qwen3's RoPE cache, but not Llama's, which is complex.
WHOLE_SEQUENCE = "c·(s/c)"  # axis of the tokens of all context-parallel ranks
CAST_INPUTS = "torch 2.13 torch/distributed/fsdp/_fully_shard/_fsdp_state.py: cast_forward_inputs"


def write(c: BlockStructure, part: str) -> tuple[Tape, Tensor | None]:
    """Return the tape of one part of the model, and its output."""
    tape = Tape(saved_component=Component.LOGITS_AND_LOSS if part == "head" else Component.ACTIVATIONS)
    ops = Operators(tape, c.dtypes, c.linears)
    if part == "embedding":
        x = (
            split_embedding(ops, c, "d")
            if c.sharding.dtensor
            else ops.embedding("embed_tokens", ("V", "d"), ("b", "s"))
        )
        return tape, x
    if part == "head":
        return _head(c, tape, ops)
    return TorchtitanLayer(c, tape, ops, experts=part == "expert layer").write()


def _head(c: BlockStructure, tape: Tape, ops: Operators) -> tuple[Tape, None]:
    x = tape.input("head input", ("b", TensorParallelOps(ops, c).stream, "d"), c.stream, SOURCE)
    write_loss(ops, c, norm(ops, c.norm, x, "norm"), "d")
    return tape, None


class TorchtitanLayer:
    """Writer of a TransformerBlock.

    Args:
        c: the structure.
        tape: the tape of the layer.
        ops: its operators.
        experts: whether the layer has experts in place of the MLP.
    """

    def __init__(self, c: BlockStructure, tape: Tape, ops: Operators, *, experts: bool) -> None:
        self.c, self.tape, self.ops, self.has_experts = c, tape, ops, experts
        self.split = TensorParallelOps(ops, c)
        self.axis = c.sharding.axis

    def write(self) -> tuple[Tape, Tensor]:
        """Return the tape of the layer, and its output."""
        c, tape, ops = self.c, self.tape, self.ops
        tape.checkpoints.stops_early = False  # torchtitan/config/job_config.py, ActivationCheckpoint: early_stop
        x = tape.input("layer input", ("b", self.split.stream, "d"), c.stream, SOURCE)
        if c.projections.qk_norm and c.dtypes.parameters != "fp32":  # gathered in 16 bits
            whole = (WHOLE_SEQUENCE if c.sharding.context_parallel else "s", "2·d_h")
            tape.arguments.append(ops.table("RoPE cache, cast", whole, c.dtypes.compute, CAST_INPUTS))
        normed = norm(ops, c.norm, x, "input_norm")
        latent = c.projections.mla
        attended = TorchtitanLatentAttention(self).output(normed) if latent else self.attention(normed)
        self.split.returned(normed)
        x = ops.add(x, attended, "attention sum")
        normed = norm(ops, c.norm, x, "post_attention_norm")
        fed = TorchtitanMoe(self).output(normed) if self.has_experts else self.mlp(normed)
        self.split.returned(normed)
        output = ops.add(x, fed, "layer output")
        if c.saving.selective:
            tape.recompute_all(self.kept())
        return tape, output

    def attention(self, normed: Tensor) -> Tensor:
        """Attention.forward, with a kernel that takes grouped heads."""
        c, ops, split = self.c, self.ops, self.split
        x = split.module_input(normed, "attention")
        h, kv = self.axis("h"), self.axis("h_kv" if c.attention.grouped else "h")
        width = self.axis(c.attention.query_width)
        kv_width = self.axis("h_kv·d_h") if c.attention.grouped else width
        q, k, v = (
            split.column(x, f"attention.{name}_proj", (out, "d"), ("b", "s", heads, "d_h"), bias=False)
            for name, out, heads in (("q", width, h), ("k", kv_width, kv), ("v", kv_width, kv))
        )
        v = self.by_head(v, "v")
        if c.projections.qk_norm:
            q = self.by_head(norm(ops, c.norm, q, "attention.q_norm", "d_h"), "q")
            k = self.by_head(norm(ops, c.norm, k, "attention.k_norm", "d_h"), "k")
        q, k = self.rotated_halves(q, k) if c.projections.qk_norm else self.rotated_pairs(q, k)
        if c.attention.repeats_heads:
            kv, heads = h, ("b", "s", h, "d_h")
            k, v = ops.copy(k, "k for each head", heads), ops.copy(v, "v for each head", heads)
        if c.attention.rotation:
            core = ops.ring_attention(q, k, v, h, kv, "d_h", c.attention.rotation)
            core = ops.ring_output_by_token(core, h, "d_h")
        elif c.attention.kernel == "math":
            core = math_attention(ops, c, q, k, v, "d_h", by_head=False)
        else:
            core = ops.flash_attention(q, k, v, h, kv, "d_h", "s", splits=True)
        out = split.row(core, "attention.o_proj", ("d", width), bias=False)
        split.returned(x, q, k, v, core)
        return out

    def by_head(self, x: Tensor, name: str) -> Tensor:
        """A view of heads; the math kernel's gradient is by head, and backward copies it by token.

        A single head has the same layout by head and by token.
        """
        attention = self.c.attention
        copies = attention.by_matmuls and not (attention.single_key_head and name != "q")
        return self.ops.restrided_view(x, name) if copies else x

    def mlp(self, normed: Tensor) -> Tensor:
        """FeedForward.forward of all tokens."""
        x = self.split.module_input(normed, "mlp")
        out = self.feed_forward(x, "mlp.", self.c.mlp.width)
        self.split.returned(x)
        return out

    def feed_forward(self, x: Tensor, prefix: str, width: str, *, shared: bool = False) -> Tensor:
        """FeedForward.forward: w2(silu(w1(x)) * w3(x)).

        Args:
            x: the input.
            prefix: of the names of its linear layers.
            width: axis of its inner features.
            shared: whether it is a shared expert, of which the sum with the routed ones is reduced.
        """
        ops, split = self.ops, self.split
        inner = self.axis(width)
        into = ("b", "s", inner)
        gate = split.column(x, f"{prefix}gate_proj", (inner, "d"), into, bias=False)
        activated = ops.pointwise(gate, f"{prefix}silu")
        up = split.column(x, f"{prefix}up_proj", (inner, "d"), into, bias=False)
        product = ops.mul(activated, up, f"{prefix}silu(gate) * up")
        if shared:
            return ops.linear(product, f"{prefix}down_proj", ("d", inner), ("b", "s", "d"), bias=False)
        return split.row(product, f"{prefix}down_proj", ("d", inner), bias=False)

    def record_table(self, table: Tensor) -> None:
        """Record a tensor that a kernel fills."""
        self.tape.record(Node(self.tape.storages[table.storage].name, (), (table,), (), ()))

    def rotated_pairs(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Llama's apply_rotary_emb: pairs of features as complex fp32 numbers, times a cache, and back.

        The gradient must be by token before it is complex (torch 2.13 tools/autograd/derivatives.yaml, view_as_real).
        """
        ops, given = self.ops, (q, k)
        wide = [ops.cast(x, "fp32", f"{name} in fp32") for name, x in (("q", q), ("k", k))]
        rows = self.cached_rows("d_h", "fp32")
        turned = [
            self.by_head(self.times_cache(x, name, "d_h", rows), name) for name, x in zip("qk", wide, strict=True)
        ]
        q, k = (ops.cast(x, q.dtype, f"rotated {name}") for name, x in zip("qk", turned, strict=True))
        self.tape.still_referenced(*given, *wide, *turned, *((rows,) if rows else ()))
        return q, k

    def cached_rows(self, width: str, dtype: str) -> Tensor | None:
        """Return the RoPE cache of the positions that a context-parallel rank has; None: it is a view of the cache.

        models/llama3/model/model.py, reshape_for_broadcast: rows of the cache, of several sequences apart.
        """
        if not self.c.sharding.context_parallel:
            return None
        shape = ("b", "s", width) if self.c.batched else ("s", width)
        return self.ops.table("RoPE cache of the rank's positions", shape, dtype, "aten::index, aten::gather")

    def times_cache(self, x: Tensor, name: str, width: str, rows: Tensor | None = None) -> Tensor:
        """Multiply by the complex cache of `width` features; backward multiplies by a copy of its conjugate.

        Source: torch 2.13 torch/csrc/autograd/FunctionsManual.cpp, mul_tensor_backward.

        Args:
            x: queries or keys, as complex numbers.
            name: their name.
            width: axis of the features.
            rows: the cache of the rank's positions; None: that of all.
        """
        turned, shape = f"{name} turned", ("s", width) if rows is None else rows.shape
        y = self.ops.mul_table(x, turned, "fp32") if rows is None else self.ops.mul(x, rows, turned)
        conjugate = self.tape.store(f"conjugate of the cache for {name}", shape, "fp32", "aten::resolve_conj")
        node = self.tape.nodes[-1]
        node.backward = node.backward._replace(prepares=((conjugate, 1),), between=((conjugate, -1),))
        return y

    def rotated_halves(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Qwen3's apply_rotary_emb: x * cos + (-second half, first half) * sin.

        Both are views of the cache: of the layer's copy that FSDP2 casts, else of the model's buffer.
        """
        given, cache = (q, k), next(iter(self.tape.arguments), None)
        cache = self.cached_rows("2·d_h", "fp32" if cache is None else cache.dtype) or cache
        q, k = self._rotated(q, "q", cache), self._rotated(k, "k", cache)
        self.tape.still_referenced(*given)
        return q, k

    def _rotated(self, x: Tensor, name: str, cache: Tensor | None) -> Tensor:
        ops = self.ops
        half = (*x.shape[:-1], "d_h/2")
        straight = self._times_cached(x, f"{name} * cos", cache)
        first, second = ops.slices(x, (half, half), f"{name} halves")
        turned = ops.concatenate((ops.scale(second, f"-{name} half"), first), x.shape, f"turned {name}")
        return ops.add(straight, self._times_cached(turned, f"turned {name} * sin", cache), f"rotated {name}")

    def _times_cached(self, x: Tensor, name: str, cache: Tensor | None) -> Tensor:
        if cache is None:
            return self.ops.mul_table(x, name, "fp32")
        return self.ops.mul(x, Tensor(cache.storage, (*cache.shape[:-1], "d_h"), cache.dtype, grad=False), name)

    def kept(self) -> tuple[int, ...]:
        """Return the results that selective recomputation by operator keeps.

        Every second matmul is recomputed, starting with the second; the results of attention, and what ranks have
        summed and scattered, are kept (_op_sac_save_list).
        """
        nodes = self.tape.nodes
        matmuls = [node for node in nodes if node.multiplies]
        # The math kernel is no operator of its own: its batched products are not on the list.
        attention = [node for node in nodes if node.name == "attention"]
        summed = [node for node in nodes if node.name.endswith("summed")] if self.c.sharding.sequence_parallel else []
        if self.has_experts:
            summed += kept_exchanges(self.c, nodes)
        results = [tensor.storage for node in (*matmuls[::2], *summed, *attention) for tensor in node.outputs]
        return (*results, *(storage for node in attention for storage in node.forward.also))
