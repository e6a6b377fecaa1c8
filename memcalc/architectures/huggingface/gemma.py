"""Gemma and its successors."""

from __future__ import annotations

from memcalc.architectures.huggingface.llama import BetweenNorms, Llama
from memcalc.architectures.huggingface.modules.experts import COPIES, grouped_experts
from memcalc.architectures.huggingface.modules.norms import power_rms_norm, shifted_rms_norm
from memcalc.operators import Operators
from memcalc.programs.tape import Tensor


class Gemma(Llama):
    """GemmaDecoderLayer: norms with a weight around 1; the embedding module scales its output."""

    def norm(self, x: Tensor, module: str, width: str) -> Tensor:
        """GemmaRMSNorm."""
        return shifted_rms_norm(self.ops, x, module, width)

    def token_embedding(self) -> Tensor:
        """GemmaTextScaledWordEmbedding: rows times a buffer of one element.

        With a frozen embedding, the module's output is the tensor set to require a gradient.
        """
        rows = super().token_embedding()
        leaf = self.tape.leaves.pop(rows.storage, None) is not None
        rows.grad = rows.grad and not leaf
        scaled = self.ops.scale(rows, "scaled embeddings")
        if rows.grad:
            self.tape.also_saves(Tensor(-1, ("1",), self.c.dtypes.embedded))
        if leaf:
            scaled.grad = True
            self.tape.leaves[scaled.storage] = self.tape.nodes[-1]
        return scaled


class Gemma2(BetweenNorms, Gemma):
    """Gemma2DecoderLayer: norms before and after both branches; scores and logits are soft-capped."""

    masks_windows = True

    def scores(self, x: Tensor) -> Tensor:
        """attn_logit_softcapping."""
        return self.soft_capped(x, "scores")

    def logits(self, x: Tensor) -> Tensor:
        """final_logit_softcapping."""
        return self.soft_capped(x, "logits")


class Gemma3(BetweenNorms, Gemma):
    """Gemma3DecoderLayer: norms before and after both branches, QK norms; a separate RoPE cache for windows."""

    norms_heads = "together"
    masks_windows = True
    turns_windows = True


class Gemma4(Gemma3):
    """Gemma4TextDecoderLayer without per-layer inputs and without layers that share keys and values."""

    def norm(self, x: Tensor, module: str, width: str) -> Tensor:
        """Gemma4RMSNorm."""
        return power_rms_norm(self.ops, x, module, width)

    def logits(self, x: Tensor) -> Tensor:
        """final_logit_softcapping."""
        return self.soft_capped(x, "logits")

    def layer(self) -> Tensor:
        """Attention between two norms, then the MLP between two, perhaps with experts; the sum times a buffer."""
        x = self.residual(self.entry(), self.attention, "attention sum", self.attention_norms)
        y = self.fed_to_experts(x) if self.experts else self.fed(x)
        return self.ops.multiply_in_place(y, "layer output times layer_scalar", self.c.dtypes.parameters)

    def fed(self, x: Tensor) -> Tensor:
        """The residual sum with the MLP between two norms."""
        return self.residual(x, self.mlp, "layer output", self.mlp_norms)

    def fed_to_experts(self, x: Tensor) -> Tensor:
        """As `fed`, plus experts, which read the MLP's input before its norm; variables reference both branches."""
        ops, tape = self.ops, self.tape
        given = self.norm(x, "post_attention_norm", "d")
        made = self.mlp(given)
        tape.still_referenced(given)
        dense = self.norm(made, "mlp.dense_output_norm", "d")
        flat = ops.flattened(x, "tokens")
        weights, chosen, probabilities = self.route(flat)
        tape.still_referenced(*self.weights)  # the layer's variable for attention weights is rebound
        self.weights = ()
        normed = self.norm(flat, "mlp.experts_input_norm", "d")
        routed = grouped_experts(ops, normed, weights, chosen, gelu_gated)
        tape.still_referenced(normed)
        experts = self.norm(routed, "mlp.experts_output_norm", "d")
        tape.still_referenced(routed)
        both = ops.add(dense, experts, "MLP and experts")
        tape.still_referenced(made)
        normed = self.norm(both, "mlp_output_norm", "d")
        tape.still_referenced(both)
        y = ops.add(x, normed, "layer output")
        tape.still_referenced(normed, dense, experts, weights, chosen, probabilities)
        return y

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gemma4TextRouter: router weights, the indices of the top experts, and all probabilities."""
        ops, tape = self.ops, self.tape
        normed = power_rms_norm(ops, x, "mlp.router_norm", "d", weight=False)
        scaled = ops.scale(ops.times_weight(normed, "mlp.router_scale", "d", second=True), "scaled router input")
        tape.still_referenced(normed)
        logits = ops.linear(scaled, "mlp.router", ("E", "d"), ("b", "s", "E"), bias=False)
        wide = logits if logits.dtype == "fp16" else ops.cast(logits, "fp32", "router logits in fp32")
        probabilities = ops.softmax(wide, "router probabilities", "fp32")
        best, chosen = ops.top_k(probabilities, COPIES, "router weights")
        best = ops.divide_in_place(best, ops.total(best, "sum of router weights"), "router weights")
        scales = ops.rows_of_bias("mlp.expert_scales", ("E",), chosen, COPIES, "weight")
        weights = ops.mul(best, scales, "router weights, scaled")
        tape.still_referenced(best, scaled, logits)
        return weights, chosen, probabilities

    @property
    def head_size(self) -> str:
        """Axis of the features of a head."""
        return "d_hf" if self.c.layer.full_heads else "d_h"

    @property
    def core_width(self) -> str:
        """Axis of attention's output, all heads together."""
        return "h·d_hf" if self.c.layer.full_heads else super().core_width

    def table_size(self, *, windows: bool | None) -> str:
        """Axis of a RoPE cache: a whole head of its layers."""
        return "d_h" if windows else "d_hf"

    def width_and_heads(self, name: str) -> tuple[str, str]:
        """Axes of q, k or v."""
        if not self.c.layer.full_heads:
            return super().width_and_heads(name)
        return ("h·d_hf", "h") if name == "q" else ("h_kvf·d_hf", "h_kvf")

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gemma4TextAttention.forward: each is projected, normed and rotated before the next; values are not rotated.

        The norm of values has no weight.
        """
        q = self.projection(x, "q")
        q = self.positioned_alone(self.head_norm(q, "q"), "q")
        k = self.projection(x, "k")
        v = k if self.c.attention.keys_as_values else self.projection(x, "v")
        k, v = (self.by_head(k, "v"),) * 2 if v is k else (k, self.by_head(v, "v"))
        k = self.positioned_alone(self.head_norm(k, "k"), "k")
        v = power_rms_norm(self.ops, v, "attention.v_norm", self.head_size, weight=False)
        return q, k, v

    def projection(self, x: Tensor, name: str) -> Tensor:
        """q, k or v by token and head."""
        width, heads = self.width_and_heads(name)
        out = ("b", "s", heads, self.head_size)
        return self.ops.linear(x, f"attention.{name}_proj", (width, "d"), out, bias=self.c.projections.bias)

    def head_norm(self, x: Tensor, name: str) -> Tensor:
        """QK norms."""
        return self.norm(x, f"attention.{name}_norm", self.head_size)

    def positioned_alone(self, x: Tensor, name: str) -> Tensor:
        """apply_rotary_pos_emb of one tensor, by token, which references it until it returns."""
        turned = self.rotated(x, name, ())
        self.tape.still_referenced(x)
        return turned


def gelu_gated(ops: Operators, both: Tensor) -> Tensor:
    """_default_apply_gate: gelu(gate) * up."""
    gate, up = ops.split(both, ((*COPIES, "F_e"),) * 2, "gate and up")
    product = ops.mul(ops.pointwise(gate, "mlp.experts.gelu"), up, "mlp.experts.gelu(gate) * up")
    ops.tape.still_referenced(both)
    return product
