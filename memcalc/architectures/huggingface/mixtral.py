"""Mixtral, and families with Llama's layer and routed experts instead of the MLP."""

from __future__ import annotations

from memcalc.architectures.huggingface.llama import Llama
from memcalc.architectures.huggingface.llama_variants import Granite
from memcalc.architectures.huggingface.modules.experts import COPIES, grouped_experts
from memcalc.programs.program import SharedTable
from memcalc.programs.tape import Tensor


class Mixtral(Llama):
    """MixtralDecoderLayer: experts selected by MixtralTopKRouter."""

    normalized = True  # the router weights of a token's experts sum to one
    wide_weights = True  # router weights stay in fp32
    casts_logits = True  # before the softmax, which else computes fp32 from fp16 by itself

    def mlp(self, x: Tensor) -> Tensor:
        """The MLP: experts, in layers that have them."""
        return self.routed(x) if self.experts else super().mlp(x)

    def routed(self, x: Tensor) -> Tensor:
        """MixtralSparseMoeBlock, with tokens as a matrix; it references its router's outputs until it returns."""
        x = self.ops.flattened(x, "tokens")
        logits, weights, chosen = self.route(x)
        total = grouped_experts(self.ops, x, weights, chosen, batched=self.decodes_by_generate)
        self.tape.still_referenced(logits)
        return total

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """MixtralTopKRouter: logits, the weights of the top experts, and their indices."""
        c, ops = self.c, self.ops
        x = ops.viewed(x, x.shape, "tokens of the router")
        logits = ops.linear(x, "mlp.router", ("E", "d"), ("b", "s", "E"), bias=c.experts.router_bias)
        casts = self.casts_logits or logits.dtype != "fp16"
        wide = ops.cast(logits, "fp32", "router logits in fp32") if casts else logits
        probabilities = ops.softmax(wide, "router probabilities", "fp32")
        weights, chosen = ops.top_k(probabilities, COPIES, "router weights")
        first = weights
        if self.normalized:
            weights = ops.divide_in_place(weights, ops.total(weights, "sum of router weights"), "router weights")
        if not self.wide_weights:
            weights = ops.cast(weights, logits.dtype, f"router weights in {logits.dtype}")
        self.tape.still_referenced(probabilities, first)
        return logits, weights, chosen


class Qwen3Moe(Mixtral):
    """Qwen3MoeDecoderLayer: unnormalized weights, cast to the logits' dtype."""

    normalized = False
    wide_weights = False
    casts_logits = False


class Qwen2Moe(Qwen3Moe):
    """Qwen2MoeDecoderLayer: a gated shared expert in addition to the experts."""

    def masks(self) -> None:
        """Write a second mask, of an empty window, which no layer uses (Qwen2MoeModel, causal_mask_mapping)."""
        super().masks()
        c = self.c
        if c.cache is None:
            name = "mask of a window"
            eager = c.attention.kernel == "eager"
            mask = self.eager_mask(SharedTable(name), name, windowed=True) if eager else self.window_truth(name)
            self.tape.live.names.add(mask.storage)

    def routed(self, x: Tensor) -> Tensor:
        """Qwen2MoeSparseMoeBlock, with tokens as a matrix; it references its router's outputs until it returns."""
        ops = self.ops
        x = ops.flattened(x, "tokens")
        common = self.dense(x, "mlp.shared_experts.", "F_s")
        logits, weights, chosen = self.route(x)
        total = grouped_experts(ops, x, weights, chosen, batched=self.decodes_by_generate)
        gate = ops.linear(x, "mlp.shared_expert_gate", ("1", "d"), ("b", "s", "1"), bias=False)
        gate = ops.pointwise(gate, "mlp.shared_expert_gate sigmoid", saves="output")
        gated = ops.weigh(common, gate, "gated shared expert", first=True)
        y = ops.add(total, gated, "experts and shared expert")
        self.tape.still_referenced(logits, weights, chosen)
        return y


class GraniteMoe(Granite, Mixtral):
    """GraniteMoeDecoderLayer: Granite's multipliers; the softmax of only the top logits."""

    drops_between_tables = True
    renames_embeddings = True

    def token_embedding(self) -> Tensor:
        """The embedding of the tokens, before its multiplier."""
        return Llama.token_embedding(self)

    def first_hidden(self, x: Tensor) -> Tensor:
        """inputs_embeds * embedding_multiplier, after the mask."""
        return self.ops.scale(x, "scaled embeddings")

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """GraniteMoeTopKRouter."""
        c, ops = self.c, self.ops
        logits = ops.linear(x, "mlp.router", ("E", "d"), ("b", "s", "E"), bias=c.experts.router_bias)
        logits = ops.cast(logits, "fp32", "router logits in fp32")
        best, chosen = ops.top_k(logits, COPIES, "best router logits")
        weights = ops.cast(ops.softmax(best, "router weights"), x.dtype, f"router weights in {x.dtype}")
        self.tape.still_referenced(best)
        return logits, weights, chosen
