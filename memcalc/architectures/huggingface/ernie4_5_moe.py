"""ERNIE 4.5 with experts."""

from __future__ import annotations

from memcalc.architectures.huggingface.llama_variants import Ernie4
from memcalc.architectures.huggingface.mixtral import Mixtral
from memcalc.architectures.huggingface.modules.experts import COPIES, grouped_experts
from memcalc.programs.tape import Tensor

SCORES = ("b", "s", "E")


class Ernie4Moe(Ernie4, Mixtral):
    """Ernie4_5_MoeDecoderLayer: a router in fp32, and a shared expert."""

    silent_after: tuple[str, ...] = ("mlp.router",)  # its correction bias does not train

    def routed(self, x: Tensor) -> Tensor:
        """Ernie4_5_MoeSparseMoeBlock, with tokens as a matrix."""
        ops = self.ops
        tokens = ops.flattened(x, "tokens")
        shared = self.dense(tokens, "mlp.shared_experts.", "F_s") if self.c.experts.shared else None
        logits, weights, chosen = self.route(tokens)
        total = grouped_experts(ops, tokens, weights, chosen, batched=self.decodes_by_generate)
        if shared is not None:
            total = ops.add(total, shared, "experts and shared expert")
        y = ops.cast(total, x.dtype, f"sum of experts in {x.dtype}")
        self.tape.still_referenced(logits, weights, chosen, *(() if shared is None else (shared,)))
        return y

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Ernie4_5_MoeTopKRouter: its weight is created in fp32, and autocast is off."""
        ops = self.ops
        with ops.in_fp32():
            logits = ops.fp32_linear(x, "mlp.router", ("E", "d"), SCORES)
            probabilities = ops.softmax(logits, "router probabilities")
            best, chosen = ops.top_k(ops.table("corrected probabilities", SCORES, "fp32"), COPIES, "best corrected")
            weights = ops.gather(probabilities, COPIES, "router weights", values=True, index=chosen)
            least = ops.clamped(ops.total(weights, "sum of router weights"), "sum, clamped", ("lower",))
            weights = ops.divide(weights, least, "router weights")
        weights = ops.cast(weights, x.dtype, f"router weights in {x.dtype}")
        self.tape.still_referenced(best)
        return logits, weights, chosen
