"""Mixtral, and the families whose layer is Llama's with routed experts in place of the MLP."""

from __future__ import annotations

from memcalc.estimation.blocks.huggingface.experts import COPIES, grouped_experts
from memcalc.estimation.blocks.huggingface.llama import Llama
from memcalc.estimation.tape import Tensor


class Mixtral(Llama):
    """MixtralDecoderLayer: experts chosen by MixtralTopKRouter, whose weights stay in fp32."""

    normalized = True  # the weights of a token's experts sum to one
    wide_weights = True  # and stay in fp32

    def mlp(self, x: Tensor) -> Tensor:
        """Experts, in layers that have them."""
        return self.routed(x) if self.experts else super().mlp(x)

    def routed(self, x: Tensor) -> Tensor:
        """MixtralSparseMoeBlock, which holds what its router returns until it returns itself."""
        logits, weights, chosen = self.route(x)
        total = grouped_experts(self.ops, x, weights, chosen)
        self.tape.still_named(logits)
        return total

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """MixtralTopKRouter: logits, the weights of the best experts, and which these are."""
        c, ops = self.c, self.ops
        logits = ops.linear(x, "mlp.router", ("E", "d"), ("b", "s", "E"), bias=c.router_bias)
        probabilities = ops.softmax(ops.cast(logits, "fp32", "router logits in fp32"), "router probabilities")
        weights, chosen = ops.top_k(probabilities, COPIES, "router weights")
        wide = weights
        if self.normalized:
            weights = ops.divide_in_place(weights, ops.total(weights, "sum of router weights"), "router weights")
        if not self.wide_weights:
            weights = ops.cast(weights, logits.dtype, f"router weights in {logits.dtype}")
        self.tape.still_named(probabilities, wide)
        return logits, weights, chosen


class Qwen3Moe(Mixtral):
    """Qwen3MoeDecoderLayer, and those of qwen2_moe, olmoe: weights as they are, cast in the logits' dtype."""

    normalized = False
    wide_weights = False
