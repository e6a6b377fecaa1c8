"""Llama 4: all tokens pass through every expert, scaled by router scores; layers without RoPE scale queries."""

from __future__ import annotations

from memcalc.architectures.huggingface.llama import Llama
from memcalc.architectures.huggingface.modules.norms import bare_rms_norm
from memcalc.programs.program import SharedTable
from memcalc.programs.tape import Shape, Tensor

SCORES = ("b", "s", "E")
COPIES = ("E", "b", "s")
MASK = ("b", "s", "s")  # chunks start after each sequence's padding


class Llama4(Llama):
    """Llama4TextDecoderLayer: RoPE on complex pairs, followed by QK norms."""

    norms_heads = "after positions"
    tables = ("turns of pairs",)
    wide_tables = True
    masks_windows = True
    window_mask = MASK
    wide_probabilities = True
    router_logits: tuple[Tensor, ...] = ()
    temperatures: tuple[Tensor, ...] = ()  # and the positions that they are computed from

    def window_truth(
        self,
        name: str,
        shape: Shape | None = None,  # noqa: ARG002 - chunks are of each sequence
        table: SharedTable | None = None,
        *,
        of_sequences: bool = False,  # noqa: ARG002
    ) -> Tensor:
        """A mask, true where a key is in the query's chunk and not after it (masking_utils.py, chunked_overlay)."""
        ops, counted, chunks = self.ops, self._counted(name), []
        for of in ("keys", "queries"):
            unpadded = ops.table(f"{name}: {of} without padding", ("b", "s"), "int64", of=counted)
            chunks.append(ops.table(f"{name}: chunks of {of}", ("b", "s"), "int64", of=(unpadded,)))
        same = ops.table(f"{name}: in the chunk", MASK, "bool", of=tuple(chunks))
        first = ops.table(f"{name}: in the chunk, and allowed", MASK, "bool", of=(same,))
        causal = ops.table(f"{name}: not behind", ("s", "s"), "bool", of=counted)
        both = self.shared_table(name, MASK, "bool", first, causal, table=table)
        self.tape.still_referenced(*counted)
        return both

    def rotary_tables(self, *, windows: bool | None) -> list[Tensor]:
        """Llama4TextRotaryEmbedding: complex64 numbers, one per pair of features."""
        ops, (name,), whole = self.ops, self.tables, ("s", self.table_size(windows=windows))
        angles, ones = (ops.table(each, ("s", f"{whole[1]}/2"), "fp32") for each in ("angles", "ones"))
        turns = ops.table(f"{name} before their factor", whole, "fp32", of=(ones,))
        found = self.shared_table(name, whole, "fp32", turns, table=SharedTable(name, windows))
        self.tape.still_referenced(angles, turns)
        return [found]

    def layer(self) -> Tensor:
        """Llama's layer; variables reference attention's input until the sum, and all outputs of branches."""
        x = self.entry()
        normed = self.norm(x, "input_norm", "d")
        attended = self.attention(normed)
        total = self.ops.add(x, attended, "attention sum")
        self.tape.still_referenced(normed)
        y = self.residual(total, self.mlp, "layer output", self.mlp_norms)
        self.tape.still_referenced(attended, *self.router_logits)
        return y

    def rms_norm(self, x: Tensor, module: str, width: str) -> Tensor:
        """Llama4TextRMSNorm: normed * weight; no variable references its fp32 products."""
        return self.ops.composite_rms_norm(x, module, width, second=True)

    def head_norm(self, x: Tensor, name: str) -> Tensor:
        """Llama4TextL2Norm, in layers with RoPE."""
        if not self.c.projections.qk_norm or self.c.layer.without_rope:
            return x
        return bare_rms_norm(self.ops, x, f"attention.{name}_norm", "d_h")

    def positioned(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """apply_rotary_emb: complex64 products; a pair of fp32 numbers is viewed as complex."""
        ops = self.ops
        if self.c.layer.without_rope:
            return q, k
        wide = [(x, name, ops.cast(x, "fp32", f"{name} in fp32")) for x, name in ((q, "q"), (k, "k"))]
        turned = [self.turned(each, name) for _, name, each in wide]
        found = [ops.cast(y, x.dtype) for y, (x, _, _) in zip(turned, wide, strict=True)]
        self.tape.still_referenced(*turned, *(each for _, _, each in wide))
        return found[0], found[1]

    def turned(self, x: Tensor, name: str) -> Tensor:
        """A complex product, viewed as real numbers; its backward copies the conjugate of the other factor."""
        y = self.ops.mul_table(x, f"{name} * turns", "fp32", *self.tables)
        size = self.table_size(windows=None)
        conjugate = self.tape.store(f"{name} * turns: conjugate", ("s", size), "fp32", "aten::resolve_conj")
        node = self.tape.nodes[-1]
        node.backward = node.backward._replace(prepares=((conjugate, 1),))
        return self.ops.restrided_view(y, name) if self.comes_by_head(name) else y

    def by_head(self, x: Tensor, name: str) -> Tensor:
        """q, k or v split into heads; the gradient of rotated ones is in order after the complex product."""
        in_order = name != "v" and not self.c.layer.without_rope
        return self.ops.restrided_view(x, name) if self.comes_by_head(name) and not in_order else x

    def comes_by_head(self, name: str) -> bool:
        """Whether attention's gradient of q, k or v is contiguous by head."""
        return self.c.attention.by_matmuls or (name != "q" and self.sums_shared_heads)

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values; without RoPE, queries are scaled by position (attn_temperature_tuning)."""
        q, k, v = super().queries_keys_values(x)
        if not self.c.layer.without_rope:
            return q, k, v
        ops = self.ops
        counted = ops.table("positions so far", ("s",), "int64", "aten::arange")
        positions = ops.table("positions", ("s",), "int64", of=(counted,))
        scales = ops.table("temperatures", ("s",), "fp32")
        tempered = ops.cast(ops.mul(q, scales, "tempered q"), q.dtype)
        self.tape.still_referenced(q)
        self.temperatures = (positions, scales)
        return tempered, k, v

    def attended(self, x: Tensor) -> Tensor:
        """End of attention: its variables are released."""
        self.tape.still_referenced(*self.temperatures)
        return x

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention; eager attention in the dtype of its scores."""
        if self.c.attention.kernel == "eager":
            return self.eager(q, k, v, softmax_in_fp32=False)
        return self.scaled_dot_product(q, k, v)

    def mlp(self, x: Tensor) -> Tensor:
        """The MLP: experts, in layers that have them."""
        return self.routed(x) if self.experts else super().mlp(x)

    def routed(self, x: Tensor) -> Tensor:
        """Llama4TextMoe: a copy of all tokens for each expert."""
        ops = self.ops
        tokens = ops.flattened(x, "tokens")
        logits, scores = self.route(tokens)
        copies = ops.copy(tokens, "tokens for each expert", (*COPIES, "d"))
        scaled = ops.weigh(copies, ops.copy(scores, "router scores by expert"), "tokens by their scores")
        made = self.every_expert(scaled)
        shared = self.dense(tokens, "mlp.shared_experts.", "F_s")
        routed = ops.sum_of_copies(made, x.shape, "sum of experts")
        total = ops.add_in_place(shared, routed, "experts and shared expert")
        self.tape.still_referenced(scores, scaled, made, *self.weights)
        self.router_logits, self.weights = (logits,), ()  # they take over the variable of the attention weights
        return total

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Llama4Router: sigmoids of the top logits, zeros elsewhere."""
        ops = self.ops
        logits = ops.linear(x, "mlp.router", ("E", "d"), SCORES, bias=self.c.experts.router_bias)
        best, chosen = ops.top_k(logits, ("b", "s", "k"), "best router logits")
        others = ops.placed(best, chosen, SCORES, "best logits among the others")
        wide = ops.pointwise(ops.cast(others, "fp32"), "router scores in fp32", saves="output")
        scores = ops.cast(wide, logits.dtype, "router scores")
        self.tape.still_referenced(best, chosen, others)
        return logits, scores

    def every_expert(self, x: Tensor) -> Tensor:
        """Llama4TextExperts."""
        ops = self.ops
        both = (*COPIES, "2·F_e")
        joined = ops.batched_linear(x, "mlp.experts.gate_up_proj", ("E", "d", "2·F_e"), both, bias=False)
        gate, up = ops.split(joined, ((*COPIES, "F_e"),) * 2, "gate and up")
        product = ops.mul(up, self.act(gate, "mlp.experts."), "mlp.experts.up * silu(gate)")
        y = ops.batched_linear(product, "mlp.experts.down_proj", ("E", "F_e", "d"), (*COPIES, "d"), bias=False)
        self.tape.still_referenced(joined)
        return y
