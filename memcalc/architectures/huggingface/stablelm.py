"""StableLM."""

from __future__ import annotations

from memcalc.architectures.huggingface.llama import PartialRotary
from memcalc.programs.tape import Tensor


class StableLm(PartialRotary):
    """StableLmDecoderLayer: PyTorch's LayerNorm, RoPE on a part of each head, dropout of the MLP's output."""

    silent_after: tuple[str, ...] = ("mlp.down_proj",)
    views_last = True

    def layer(self) -> Tensor:
        """Attention and MLP in parallel or sequentially; variables reference both outputs."""
        ops, x = self.ops, self.entry()
        given = self.norm(x, "input_norm", "d")
        attended = self.attention(given)
        total = ops.add(x, attended, "attention sum") if not self.c.residual.parallel else x
        normed = given if self.c.residual.parallel else self.norm(total, "post_attention_norm", "d")
        fed = self.mlp(normed)
        self.tape.still_referenced(normed)
        fed = ops.dropout(fed, "mlp dropout", self.c.residual.dropout)
        if self.c.residual.parallel:
            total = ops.add(x, attended, "attention sum")
        y = ops.add(total, fed, "layer output")
        self.tape.still_referenced(given, attended, fed)
        return y

    def head_norm(self, x: Tensor, name: str) -> Tensor:
        """StableLmLayerNormPerHead: heads are split, normed separately, and concatenated."""
        if not self.c.projections.qk_norm:
            return x
        ops, module = self.ops, f"attention.{name}_norm"
        seen = x if self.c.attention.by_matmuls else ops.restrided_view(x, name)
        (parts,) = ops.split(seen, (x.shape,), f"heads of {name}")
        normed = ops.layer_norm(parts, module, "d_h", ("weight",), heads=x.shape[-2])
        return ops.concatenate((normed,), x.shape, f"{name} normed, joined")
