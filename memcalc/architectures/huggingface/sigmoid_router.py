"""Families with sigmoid router scores, which select experts by scores plus a router bias."""

from __future__ import annotations

from memcalc.architectures.huggingface.mixtral import Mixtral
from memcalc.architectures.huggingface.modules.experts import COPIES, grouped_experts
from memcalc.architectures.huggingface.olmo import FullRowQKNorm
from memcalc.programs.tape import Tensor

SCORES = ("b", "s", "E")


class MiniMaxM2(FullRowQKNorm, Mixtral):
    """MiniMaxM2DecoderLayer: QK norms over full rows, RoPE on a part of each head."""

    always_joins = True

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """MiniMaxM2TopKRouter: biased scores get no gradient, since only their indices are used."""
        c, ops = self.c, self.ops
        x = ops.viewed(x, x.shape, "tokens of the router")
        logits = ops.linear(x, "mlp.router", ("E", "d"), SCORES, bias=c.experts.router_bias)
        scores = ops.pointwise(ops.cast(logits, "fp32", "router logits in fp32"), "router scores", saves="output")
        corrected = ops.table("corrected scores", SCORES, "fp32")
        best, chosen = ops.top_k(corrected, COPIES, "best corrected scores")
        weights = ops.gather(scores, COPIES, "router weights", values=True, index=chosen)
        wide = weights
        weights = ops.divide_in_place(weights, ops.total(weights, "sum of router weights"), "router weights")
        self.tape.still_referenced(scores, corrected, best, wide)
        return logits, weights, chosen


class GroupLimitedRouter(Mixtral):
    """Experts of the top groups, and a shared expert (DeepSeek-V3, and families that copy it)."""

    groups = "1"  # default of the family's config
    best_groups = "1"

    def routed(self, x: Tensor) -> Tensor:
        """DeepseekV3MoE."""
        ops = self.ops
        logits, weights, chosen = self.route(ops.flattened(x, "tokens of the router"))
        total = grouped_experts(ops, x, weights, chosen, batched=self.decodes_by_generate)
        y = ops.add(total, self.dense(x, "mlp.shared_experts.", "F_s"), "experts and shared expert")
        self.tape.still_referenced(logits, weights, chosen, total)
        return y

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """DeepseekV3TopkRouter, in fp32."""
        ops = self.ops
        logits = ops.fp32_linear(x, "mlp.router", ("E", "d"), SCORES)
        scores = ops.pointwise(logits, "router scores", saves="output")
        chosen, named, saved = self.choose()
        weights = gathered = ops.gather(scores, COPIES, "router weights", values=True, index=chosen)
        divisor = ops.shift(ops.total(weights, "sum of router weights"), "sum of router weights + 1e-20")
        weights = ops.divide_in_place(weights, divisor, "router weights")
        weights = ops.scale(weights, "scaled router weights")
        self.tape.still_referenced(logits, scores, divisor, gathered, *named)
        self.tape.referenced_by_graph(*saved)
        return logits, weights, chosen

    def choose(self) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The selected experts' indices, tensors that variables reference, and tensors that their operators save."""
        ops, groups = self.ops, ("b", "s", self.groups)
        corrected = ops.table("corrected scores", SCORES, "fp32")
        best, which = ops.top_k(corrected, (*groups, "2"), "best scores of each group")
        of_groups = ops.table("scores of groups", groups, "fp32")
        self.tape.still_referenced(best)
        _, best_groups = ops.top_k(of_groups, (*groups[:2], self.best_groups), "best groups")
        mask = ops.table("mask of groups", groups, "fp32")
        named = [of_groups, best_groups, mask]
        if self.groups != "1":  # otherwise a view
            named.append(ops.table("mask of scores", SCORES, "fp32"))
        truth = ops.table("mask in bool", SCORES, "bool")
        others = ops.table("mask of other groups", SCORES, "bool", of=(truth,))
        masked = ops.table("masked scores", SCORES, "fp32", of=(others,))
        self.tape.still_referenced(corrected)
        _, chosen = ops.top_k(masked, COPIES, "best masked scores")
        return chosen, (*named, masked), (which, others)


class Glm4Moe(GroupLimitedRouter):
    """Glm4MoeDecoderLayer: QK norms, RoPE on a part of each head."""

    norms_heads = "together"
    always_joins = True
