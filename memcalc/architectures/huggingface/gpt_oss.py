"""gpt-oss: attention with sinks, experts with biases and clamps."""

from __future__ import annotations

from memcalc.architectures.huggingface.mixtral import Mixtral
from memcalc.architectures.huggingface.modules.experts import COPIES, grouped_experts
from memcalc.architectures.huggingface.modules.norms import fp32_rms_norm
from memcalc.operators import Operators
from memcalc.programs.tape import Shape, Tensor


class GptOss(Mixtral):
    """GptOssDecoderLayer: RoPE on halves of heads as pairs; every second layer has a sliding window."""

    activation_is_module = False
    transposes_experts = False  # modeling_gpt_oss.py: is_transposed=True, its weights are (in, out)
    masks_windows = True

    def norm(self, x: Tensor, module: str, width: str, out: Shape | None = None) -> Tensor:
        """GptOssRMSNorm, which casts its result at the end."""
        return fp32_rms_norm(self.ops, x, module, width, out)

    @property
    def rotated_size(self) -> str:
        """Axis of the rotary features: one angle per pair."""
        return "d_h/2"

    @property
    def rotated_by_head(self) -> bool:
        """Whether rotated queries and keys are contiguous by head: they are concatenated in that order."""
        return True

    def positioned(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """_apply_rotary_emb on the halves of each head."""
        found = []
        for x, name in ((q, "q"), (k, "k")):
            half = (*x.shape[:-1], "d_h/2")
            found.append(self.rotated_pairs(x, name, *self.ops.split(x, (half, half), f"{name} halves")))
        return found[0], found[1]

    def scaled_dot_product(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Kernels of flash-attn also take the sinks, which get a gradient."""
        k, v = self.in_training_cache(k, v)
        sinks = self.ops.expand_parameter("attention.sinks", ("h",), ("h",))
        core = self.ops.flash_attention(q, k, v, "h", "h_kv", "d_h", ("s", self.c.keys))
        self.tape.also_reads(sinks)
        return self.ops.copy(core, "attention output by token")  # has the strides of the rotated queries

    def eager(self, q: Tensor, k: Tensor, v: Tensor, *, softmax_in_fp32: bool) -> Tensor:  # noqa: ARG002
        """eager_attention_forward of gpt_oss: each head has an additional logit in the softmax, the sink."""
        c, ops = self.c, self.ops
        k, v = self.in_training_cache(k, v)
        heads, all_of = ("b", "s", "h", "d_h"), ("b", "h", "s", c.keys)
        more, of_keys = (*all_of[:-1], f"{c.keys}+1"), ("b", c.keys, "h", "d_h")
        if c.attention.grouped:
            k, v = ops.copy(k, "k for each head", of_keys), ops.copy(v, "v for each head", of_keys)
        scores = ops.scale(ops.matmul(q, k, "scores", all_of), "scaled scores")
        masked = ops.shift(scores, "masked scores", c.dtypes.embedded)
        sinks = ops.expand_parameter("attention.sinks", ("h",), ("b", "h", "s", "1"))
        combined = ops.minus_largest(ops.concatenate((masked, sinks), more, "scores and sinks"), "combined logits")
        probabilities = ops.softmax(combined, "attention probabilities", combined.dtype)
        (kept,) = ops.slices(probabilities, (all_of,), "probabilities without sinks")
        dropped = ops.dropout(kept, "attention probabilities dropout", c.attention.dropout)
        weights = ops.cast(dropped, v.dtype, "probabilities in dtype")
        self.tape.still_referenced(masked)
        values = ops.copy(v, "v by head") if self.copies_keys and not c.attention.grouped else v
        self.weights = (weights,)
        core = ops.matmul(weights, values, "attention output", heads)
        by_token = self.by_token(core)
        self.tape.still_referenced(combined, probabilities)
        if c.attention.grouped:
            self.tape.still_referenced(k, v)
        return by_token

    def routed(self, x: Tensor) -> Tensor:
        """GptOssMLP, with tokens as a matrix."""
        x = self.ops.flattened(x, "tokens")
        logits, weights, chosen = self.route(x)
        total = grouped_experts(
            self.ops,
            x,
            weights,
            chosen,
            clamped,
            biases=self.c.experts.bias,
            batched=self.decodes_by_generate,
        )
        self.tape.still_referenced(logits, *self.weights)  # the layer's variable for attention weights is rebound
        self.weights = (weights,)
        return total

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """GptOssTopKRouter: the softmax of the top logits, in their dtype."""
        c, ops = self.c, self.ops
        logits = ops.linear(x, "mlp.router", ("E", "d"), ("b", "s", "E"), bias=c.experts.router_bias)
        best, chosen = ops.top_k(logits, COPIES, "best router logits")
        weights = ops.softmax(best, "router weights", best.dtype)
        self.tape.still_referenced(best)
        return logits, weights, chosen


def clamped(ops: Operators, both: Tensor) -> Tensor:
    """GptOssExperts._apply_gate: (up + 1) * gate * sigmoid(alpha * gate), both clamped."""
    half = (*COPIES, "F_e")
    gate, up = ops.slices(both, (half, half), "gate and up")
    gate = ops.clamp(gate, "gate, clamped", bounds=1)
    up = ops.clamp(up, "up, clamped", bounds=2)
    share = ops.pointwise(ops.scale(gate, "alpha * gate"), "mlp.experts.sigmoid", saves="output")
    opened = ops.mul(gate, share, "gate * sigmoid")
    product = ops.mul(ops.shift(up, "up + 1"), opened, "mlp.experts.(up + 1) * gate")
    ops.tape.still_referenced(both, gate, up, opened)
    return product
