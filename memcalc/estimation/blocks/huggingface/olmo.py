"""OLMo and its successors, and EXAONE 4."""

from __future__ import annotations

from memcalc.estimation.blocks.huggingface.llama import Llama
from memcalc.estimation.blocks.huggingface.mixtral import Qwen3Moe
from memcalc.estimation.blocks.huggingface.norms import bare_layer_norm, wide_rms_norm
from memcalc.estimation.tape import Shape, Tensor


class Olmo(Llama):
    """OlmoDecoderLayer: norms without parameters; positions in fp32."""

    wide_tables = True
    views_last = True

    def norm(self, x: Tensor, module: str, width: str) -> Tensor:
        """OlmoLayerNorm."""
        return bare_layer_norm(self.ops, x, module, width)


class After(Llama):
    """Exaone4DecoderLayer: the norms come after the branches."""

    def layer(self) -> Tensor:
        """Attention and its norm, then the MLP and its."""
        x = self.residual(self.entry(), self.attention, "attention sum", after="attention_output_norm")
        return self.residual(x, self.mlp, "layer output", after="mlp_output_norm")


class Exaone4(After):
    """Exaone4Attention: norms of heads."""

    norms_heads = "together"
    masks_windows = True


class WholeRows(Llama):
    """Norms of all heads of queries, and of keys, together."""

    def norm(self, x: Tensor, module: str, width: str, out: Shape | None = None) -> Tensor:
        """LlamaRMSNorm, whose output is seen with other axes."""
        return self.ops.composite_rms_norm(x, module, width, out=out, named=True)

    def projected(self, x: Tensor) -> dict[str, Tensor]:
        """q_norm(q_proj(x)), of whole rows that are seen head by head afterwards."""
        c, ops = self.c, self.ops
        parts = {}
        for name in ("q", "k", "v"):
            width, heads = self.width_and_heads(name)
            out, rows = ("b", "s", heads, "d_h"), ("b", "s", width)
            normed = name != "v"
            part = ops.linear(x, f"attention.{name}_proj", (width, "d"), rows if normed else out, bias=c.qkv_bias)
            part = self.norm(part, f"attention.{name}_norm", width, out) if normed else part
            parts[name] = part
        return {name: self.by_head(part, name) for name, part in parts.items()}


class Olmo2(WholeRows, After):
    """Olmo2DecoderLayer: norms of whole rows, whose products are cast last; positions in fp32."""

    wide_tables = True

    def norm(self, x: Tensor, module: str, width: str, out: Shape | None = None) -> Tensor:
        """Olmo2RMSNorm."""
        return wide_rms_norm(self.ops, x, module, width, out)


class Olmo3(Olmo2):
    """Olmo3DecoderLayer: masks and tables of their own for layers with windows."""

    masks_windows = True
    turns_windows = True


class Olmoe(WholeRows, Qwen3Moe):
    """OlmoeDecoderLayer: norms of whole rows, and Qwen3-MoE's router."""
