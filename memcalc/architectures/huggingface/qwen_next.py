"""Qwen3-Next and Qwen3.5: linear attention in most layers, gated attention in the others."""

from __future__ import annotations

from memcalc.architectures.huggingface.llama import PartialRotary
from memcalc.architectures.huggingface.mixtral import Qwen2Moe
from memcalc.architectures.huggingface.modules.norms import shifted_rms_norm
from memcalc.programs.program import SharedTable
from memcalc.programs.tape import Shape, Tensor

TOKENS: Shape = ("b", "s", "h_lv")
BY_HEAD: Shape = ("b", "h_lv", "⌈s⌉₆₄")
PAIRS: Shape = (*BY_HEAD, "64")  # of the tokens of one chunk


class Qwen35(PartialRotary):
    """Qwen3_5DecoderLayer: norms with a weight around 1."""

    norms_heads = "at once"

    def norm(self, x: Tensor, module: str, width: str) -> Tensor:
        """Qwen3_5RMSNorm."""
        return shifted_rms_norm(self.ops, x, module, width)

    def rotary_tables(self, *, windows: bool | None) -> list[Tensor]:
        """Qwen3_5TextRotaryEmbedding.forward: angles in time, height and width for each sequence."""
        if self.c.cache is not None:
            return super().rotary_tables(windows=windows)
        ops, width = self.ops, self.table_size(windows=windows)
        halves, whole = ("3", "b", "s", f"{width}/2"), ("b", "s", width)
        positions = ops.table("positions in fp32", ("3", "b", "s"), "fp32")
        angles = ops.table("angles of pairs", halves, "fp32", of=(positions,))
        pairs: dict[str, Tensor] = {}
        for table in self.tables:
            plain = ops.table(f"{table} before their factor", halves, "fp32", of=(angles,))
            pairs[table] = ops.table(f"{table} of pairs", halves, "fp32", of=(plain,))
        # The sines' parts are put together first.
        if self.table_dtype == "fp32":
            found = {
                table: self.shared_table(table, whole, "fp32", pairs[table], table=SharedTable(table, windows))
                for table in reversed(self.tables)
            }
        else:
            wide = {
                table: ops.table(f"{table} in fp32", whole, "fp32", of=(pairs[table],))
                for table in reversed(self.tables)
            }
            found = {
                table: self.shared_table(table, whole, self.table_dtype, wide[table], table=SharedTable(table, windows))
                for table in self.tables
            }
            self.tape.still_referenced(*wide.values())
        self.tape.still_referenced(angles)
        return [found[table] for table in self.tables]

    def attention(self, x: Tensor) -> Tensor:
        """Linear attention, or attention with an output gate."""
        return self.linear_attention(x) if self.c.layer.linear else self.gated_attention(x)

    def gated_attention(self, x: Tensor) -> Tensor:
        """Qwen3_5Attention.forward: the query projection also makes the gate."""
        c, ops = self.c, self.ops
        self.named = ()
        both = ops.linear(x, "attention.q_proj", ("2·h·d_h", "d"), ("b", "s", "h", "2·d_h"), bias=c.projections.bias)
        query, gate = ops.split(both, (("b", "s", "h", "d_h"),) * 2, "queries and gate")
        gate = ops.copy(gate, "gate by token")
        q = self.head_norm(query, "q")
        k = ops.linear(
            x, "attention.k_proj", (self.width_and_heads("k")[0], "d"), self.heads("k"), bias=c.projections.bias
        )
        k = self.head_norm(k, "k")
        v = ops.linear(
            x, "attention.v_proj", (self.width_and_heads("v")[0], "d"), self.heads("v"), bias=c.projections.bias
        )
        v = self.by_head(v, "v")
        given = (q, k)
        q, k = self.positioned(q, k)
        self.tape.still_referenced(*given)
        core = self.core(q, k, v)
        opened = ops.pointwise(gate, "sigmoid of the gate", saves="output")
        gated = ops.mul(core, opened, "gated attention output")
        y = ops.linear(
            gated, "attention.o_proj", ("d", self.core_width), ("b", "s", "d"), bias=c.projections.output_bias
        )
        y = self.attended(y)
        self.tape.still_referenced(q, k, v, both, gate)
        return y

    def heads(self, name: str) -> Shape:
        """Axes of keys or values by head."""
        return ("b", "s", self.width_and_heads(name)[1], "d_h")

    def linear_attention(self, x: Tensor) -> Tensor:
        """Qwen3_5GatedDeltaNet.forward."""
        ops = self.ops
        mixed, z, b, a = self.projections(x)
        convolved = ops.depthwise_convolution(mixed, "linear_attn.conv1d", "d_mix", ("b", "s", "d_mix"))
        mixed = ops.pointwise(convolved, "silu of the convolution")
        heads = (("b", "s", "h_lk", "d_lk"),) * 2 + (("b", "s", "h_lv", "d_lv"),)
        query, key, value = ops.split(mixed, heads, "queries, keys and values")
        beta = ops.pointwise(b, "beta", saves="output")
        shifted = ops.plus_bias(ops.cast(a, "fp32"), "linear_attn.dt", "h_lv", "fp32")
        decay = ops.times_parameter(ops.pointwise(shifted, "softplus"), "linear_attn.A_log", "h_lv", "decay")
        for name in ("A", "-A"):
            ops.also_save(decay, name, ("h_lv",), "fp32")
        core = self.delta_rule(query, key, value, decay, beta)
        normed = self.gated_norm(core, z)
        y = ops.linear(normed, "linear_attn.out_proj", ("d", "h_lv·d_lv"), ("b", "s", "d"), bias=False)
        self.tape.still_referenced(mixed, z, b, a, beta, decay, normed)
        return y

    def projections(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values in one tensor; the gate z; beta and the decay before their activations."""
        ops = self.ops
        mixed = ops.linear(x, "linear_attn.in_proj_qkv", ("d_mix", "d"), ("b", "s", "d_mix"), bias=False)
        z = ops.linear(x, "linear_attn.in_proj_z", ("h_lv·d_lv", "d"), ("b", "s", "h_lv", "d_lv"), bias=False)
        b, a = (ops.linear(x, f"linear_attn.in_proj_{name}", ("h_lv", "d"), TOKENS, bias=False) for name in "ba")
        return mixed, z, b, a

    def delta_rule(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """torch_chunk_gated_delta_rule: fp32, in chunks of 64 tokens."""
        c, ops, tape = self.c, self.ops, self.tape
        dtype = query.dtype
        if c.mixers.grouped_linear:
            query = ops.copy(query, "queries for each value head", ("b", "s", "h_lv", "d_lk"))
            key = ops.copy(key, "keys for each value head", ("b", "s", "h_lv", "d_lk"))
        wide = [ops.cast(x, "fp32", f"{n} by head") for n, x in (("queries", query), ("keys", key), ("values", value))]
        beta, decay = ops.cast(beta, "fp32", "beta by head"), ops.copy(decay, "decay by head")
        normed = [self.unit_norm(x, name) for x, name in zip(wide, ("queries", "keys"), strict=False)]
        scaled = ops.scale(normed[0], "scaled queries")
        query, key = (
            ops.copy(x, f"{n}, padded", (*BY_HEAD, "d_lk")) for x, n in ((scaled, "queries"), (normed[1], "keys"))
        )
        value = ops.copy(wide[2], "values, padded", (*BY_HEAD, "d_lv"))
        beta, decay = (ops.copy(x, f"{n}, padded", BY_HEAD) for x, n in ((beta, "beta"), (decay, "decay")))
        v_beta = ops.mul(value, beta, "beta·values", reduces=True)
        k_beta = ops.mul(key, beta, "beta·keys", reduces=True)
        total = ops.scale(decay, "decay so far")
        pairwise = ops.differences(total, "decay between tokens", PAIRS)
        masked = ops.where(pairwise, "decay of earlier tokens", ("64", "64"))
        ops.also_save(masked, "mask of later tokens", ("64", "64"), "bool")
        pairwise = ops.pointwise(masked, "decay factors", saves="output")
        system = ops.mul(ops.matmul(k_beta, key, "keys·keys", PAIRS), pairwise, "triangular system")
        scores = ops.mul(ops.matmul(query, key, "queries·keys", PAIRS), pairwise, "scores within chunks")
        decayed = ops.mul(k_beta, ops.pointwise(total, "factors of keys", saves="output"), "decayed keys", reduces=True)
        values = ops.solved(system, v_beta, "new values")
        solved = ops.solved(system, decayed, "decayed keys, solved")
        read = ops.mul(
            query, ops.pointwise(total, "factors of queries", saves="output"), "decayed queries", reduces=True
        )
        left = ops.pointwise(ops.scale(total, "decay left"), "factors of keys left", saves="output")
        written = ops.mul(key, left, "keys to write", reduces=True)
        core = ops.scanned(values, solved, read, scores, written)
        ops.also_save(core, "decay of each chunk", ("b", "h_lv", "s_64"), "fp32")
        tape.still_referenced(
            value, beta, decay, v_beta, k_beta, total, pairwise, system, scores, decayed, values, solved
        )
        output = ops.cast(core, dtype, "linear attention output")
        return ops.viewed(output, ("b", "s", "h_lv", "d_lv"), "linear attention output by token")

    def unit_norm(self, x: Tensor, name: str) -> Tensor:
        """l2norm: x / sqrt(sum(x * x) + eps)."""
        ops = self.ops
        total = ops.mean(ops.squares(x, f"squares of {name}"), f"sum of squares of {name}")
        inverse = ops.rsqrt(ops.shift(total, f"sum of squares of {name} + eps"), f"inverse norm of {name}")
        return ops.mul(x, inverse, f"unit {name}", reduces=True)

    def gated_norm(self, x: Tensor, z: Tensor) -> Tensor:
        """Qwen3_5RMSNormGated: weight * normed * silu(z)."""
        ops = self.ops
        normed = ops.composite_rms_norm(x, "linear_attn.norm", "d_lv", named=True)
        gate = ops.pointwise(ops.cast(z, "fp32", "z in fp32"), "silu of z")
        gated = ops.mul(normed, gate, "gated output in fp32")
        y = ops.cast(gated, x.dtype, "gated output")
        return ops.viewed(y, ("b", "s", "h_lv·d_lv"), "gated output by token")


class Qwen35Moe(Qwen35, Qwen2Moe):
    """Qwen3_5MoeDecoderLayer: experts and a gated shared expert in every layer."""

    normalized = True

    def shared_tables(self) -> None:
        """Write masks and RoPE caches; no second mask as in Qwen2MoeModel."""
        super(Qwen2Moe, self).shared_tables()


class Qwen3Next(Qwen35Moe):
    """Qwen3NextDecoderLayer: one linear layer for queries, keys, values and z; the parts of its output are copied."""

    def rotary_tables(self, *, windows: bool | None) -> list[Tensor]:
        """Qwen3NextRotaryEmbedding, which is llama's."""
        return PartialRotary.rotary_tables(self, windows=windows)

    def projections(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Qwen3NextGatedDeltaNet.fix_query_key_value_ordering."""
        ops = self.ops
        joined = ("b", "s", "d_mix+h_lv·d_lv")
        both = ops.linear(x, "linear_attn.in_proj_qkvz", (joined[-1], "d"), joined, bias=False)
        pair = ops.linear(x, "linear_attn.in_proj_ba", ("2·h_lv", "d"), ("b", "s", "2·h_lv"), bias=False)
        parts = (("b", "s", "h_lk·d_lk"),) * 2 + (("b", "s", "h_lv·d_lv"), ("b", "s", "h_lv", "d_lv"))
        query, key, value, z = ops.split(both, parts, "queries, keys, values and z")
        b, a = ops.split(pair, (TOKENS, TOKENS), "beta and decay")
        names = ("queries", "keys", "values", "z", "beta", "decay")
        query, key, value, z, b, a = (
            ops.copy(x, f"{name} in order") for x, name in zip((query, key, value, z, b, a), names, strict=True)
        )
        mixed = ops.concatenate((query, key, value), ("b", "s", "d_mix"), "queries, keys and values in one")
        return mixed, z, b, a
