"""OLMo and its successors, and EXAONE 4."""

from __future__ import annotations

from memcalc.architectures.huggingface.llama import Llama
from memcalc.architectures.huggingface.mixtral import Qwen3Moe
from memcalc.architectures.huggingface.modules.norms import bare_layer_norm, fp32_rms_norm
from memcalc.programs.tape import Shape, Tensor


class Olmo(Llama):
    """OlmoDecoderLayer: norms without parameters; RoPE in fp32."""

    wide_tables = True
    views_last = True

    def norm(self, x: Tensor, module: str, width: str) -> Tensor:
        """OlmoLayerNorm."""
        return bare_layer_norm(self.ops, x, module, width)


class PostNorm(Llama):
    """Exaone4DecoderLayer: norms after the branches."""

    attention_norms = ("", "attention_output_norm")
    mlp_norms = ("", "mlp_output_norm")


class Exaone4(PostNorm):
    """Exaone4Attention: QK norms."""

    norms_heads = "together"
    masks_windows = True


class FullRowQKNorm(Llama):
    """QK norms over all heads together."""

    def norm(self, x: Tensor, module: str, width: str, out: Shape | None = None) -> Tensor:
        """LlamaRMSNorm, with its output viewed with other axes."""
        return self.ops.composite_rms_norm(x, module, width, out=out, named=True)

    def projected(self, x: Tensor) -> dict[str, Tensor]:
        """q_norm(q_proj(x)) on full rows, then split into heads."""
        c, ops = self.c, self.ops
        parts = {}
        for name in ("q", "k", "v"):
            width, heads = self.width_and_heads(name)
            out, rows = ("b", "s", heads, "d_h"), ("b", "s", width)
            normed = name != "v"
            part = ops.linear(
                x, f"attention.{name}_proj", (width, "d"), rows if normed else out, bias=c.projections.bias
            )
            part = self.norm(part, f"attention.{name}_norm", width, out) if normed else part
            parts[name] = part
        return {name: self.by_head(part, name) for name, part in parts.items()}


class Olmo2(FullRowQKNorm, PostNorm):
    """Olmo2DecoderLayer: QK norms over full rows, cast at the end; RoPE in fp32."""

    wide_tables = True

    def norm(self, x: Tensor, module: str, width: str, out: Shape | None = None) -> Tensor:
        """Olmo2RMSNorm."""
        return fp32_rms_norm(self.ops, x, module, width, out)


class Olmo3(Olmo2):
    """Olmo3DecoderLayer: separate masks and RoPE caches for layers with a sliding window."""

    masks_windows = True
    turns_windows = True


class FlexOlmo(Olmo2, Qwen3Moe):
    """FlexOlmoDecoderLayer: OLMo 2's layer, and Qwen3-MoE's router."""


class Olmoe(FullRowQKNorm, Qwen3Moe):
    """OlmoeDecoderLayer: QK norms over full rows, and Qwen3-MoE's router."""
