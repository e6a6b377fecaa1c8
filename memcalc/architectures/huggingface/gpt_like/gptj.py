"""GPT-J: CodeGen's layer with separate linear layers for q, k and v, and RoPE in the dtype of the keys."""

from __future__ import annotations

from memcalc.architectures.huggingface.gpt_like.codegen import ROTATED, CodeGen
from memcalc.architectures.huggingface.modules.fp32_attention import Fp32Attention
from memcalc.architectures.kv_cache import cached
from memcalc.programs.tape import Tensor


class Gptj(Fp32Attention, CodeGen):
    """GPTJBlock."""

    silent_after: tuple[str, ...] = ("embed_tokens", "attention.v_proj", "attention.o_proj", "mlp.down_proj")
    fp32_logits = False

    def attention(self, x: Tensor) -> Tensor:
        """GPTJAttention.forward; its variables reference their tensors until it returns."""
        c, ops = self.c, self.ops
        heads = ("b", "s", "h", "d_h")
        q, k, v = (ops.linear(x, f"attention.{name}_proj", ("d", "d"), heads, bias=False) for name in "qkv")
        v = ops.restrided_view(v, "v")
        tables = self.gathered_tables(k.dtype)
        cut = {name: ops.slices(x, ROTATED, name) for name, x in (("k", k), ("q", q))}
        turned = {name: self.rotated(turning, name, k.dtype) for name, (turning, _) in cut.items()}
        joined = {
            name: ops.concatenate((turned[name], passing), heads, f"{name} joined")
            for name, (_, passing) in cut.items()
        }
        if c.cache is not None:
            joined["k"], v = cached(ops, c.cache, joined["k"], v)
        core = self.attend_in_fp32(joined["q"], joined["k"], v)
        attended = ops.linear(core, "attention.o_proj", ("d", "d"), ("b", "s", "d"), bias=False)
        attended = ops.dropout(attended, "attention dropout", c.residual.dropout)
        self.tape.still_referenced(q, k, v, *tables, *turned.values(), *joined.values())
        return attended

    def gathered_tables(self, dtype: str) -> tuple[Tensor, ...]:
        """The layer's copied sin/cos cache, and its rows for the current positions."""
        ops = self.ops
        everywhere = ops.table("sines and cosines of all positions", (*self.rows[:-1], "S", "d_rot"), "fp32")
        places = ops.table("positions, repeated", (*self.rows, "d_rot"), "int64")
        rows = ops.table("sines and cosines", (*self.rows, "d_rot"), "fp32")
        return everywhere, places, ops.cast(rows, dtype)
