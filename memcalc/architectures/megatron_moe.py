"""Megatron-Core's mixture of experts: all-to-all dispatcher, grouped GEMMs (core/transformer/moe, core_r0.14).

Routing is assumed to be balanced: every expert gets the same number of rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.programs.tape import Tensor

if TYPE_CHECKING:
    from memcalc.architectures.megatron import MegatronLayer


class MegatronMoe:
    """Writer of MoELayer's tape."""

    def __init__(self, layer: MegatronLayer) -> None:
        self.layer = layer

    def routed(self, x: Tensor) -> Tensor:
        """Router, permutation, all-to-all, grouped GEMMs, all-to-all back, sum; and the shared expert."""
        layer = self.layer
        c, ops = layer.c, layer.ops
        tokens = ("b", layer.stream)
        experts = "E/e" if c.sharding.expert_parallel else "E"
        rows = (experts, "R")
        inner, both = f"F_e{c.sharding.expert_suffix}", f"2·F_e{c.sharding.expert_suffix}"
        router = ops.duplicated(x, "mlp.router", "E", (*tokens, "E"), bias=c.experts.router_bias, fused=False)
        scores = ops.softmax(ops.cast(router, "fp32"), "router probabilities")
        weights = ops.permuted(scores, (*tokens, "k"), "router weights", "E")
        weights = ops.regrouped(ops.exchanged(weights, "exchanged router weights"), rows, "router weights by expert")
        permuted = ops.permuted(x, (*tokens, "k", "d"), "permuted tokens")
        exchanged = ops.exchanged(permuted, "exchanged tokens")
        shared = layer.dense(x, "mlp.shared_experts.", "F_s") if c.experts.shared else None
        sent = ops.regrouped(exchanged, (*rows, "d"), "tokens by expert")
        both = both if c.mlp.gated else inner
        up = ops.grouped(sent, "mlp.experts.up", (experts, both), (*rows, both), bias=c.experts.bias)
        # The router weights are applied inside the activation, so nothing after it is saved for them.
        product = ops.weighted_glu(up, weights, "mlp.experts.activation", (*rows, inner))
        if "moe_act" in c.saving.recomputed_modules:
            layer.tape.recompute(product, (up, weights))
        done = ops.grouped(product, "mlp.experts.down", (experts, "d"), (*rows, "d"), bias=c.experts.bias)
        back = ops.exchanged(ops.regrouped(done, (*rows, "d"), "expert outputs by rank"), "exchanged expert outputs")
        total = ops.summed_experts(back, (*tokens, "d"), "sum of experts")
        if shared is not None:
            total = ops.add(total, shared, "sum with shared expert")
        # moe_layer.py, custom_forward: `hidden_states` and `dispatched_input` are referenced until the layer has its
        # output.
        layer.tape.still_referenced(permuted, exchanged)
        if "moe" in c.saving.recomputed_modules:
            layer.tape.recompute(total, (x,))
        return total
