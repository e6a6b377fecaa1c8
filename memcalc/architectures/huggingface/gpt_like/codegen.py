"""CodeGen: RoPE on a part of each head, attention in fp32, attention and MLP in parallel."""

from __future__ import annotations

from memcalc.architectures.huggingface.modules.mlp import Mlps
from memcalc.architectures.kv_cache import cached
from memcalc.programs.tape import Tensor

ROTATED = (("b", "s", "h", "d_rot"), ("b", "s", "h", "d_h-d_rot"))


class CodeGen(Mlps):
    """CodeGenBlock: RoPE on a part of each head, attention in fp32, attention and MLP in parallel."""

    silent_after: tuple[str, ...] = ("embed_tokens", "attention.qkv_proj", "attention.o_proj", "mlp.down_proj")
    rotates = False  # its layers compute their own RoPE caches
    fp32_logits = True
    names_returned = True

    def layer(self) -> Tensor:
        """Attention and the MLP after one norm."""
        c, ops = self.c, self.ops
        x = self.entry()
        normed = ops.layer_norm(x, "input_norm", "d")
        attended = self.attention(normed)
        inner = c.mlp.width
        up = ops.linear(normed, "mlp.up_proj", (inner, "d"), ("b", "s", inner), bias=True)
        down = ops.linear(self.act(up, "mlp."), "mlp.down_proj", ("d", inner), ("b", "s", "d"), bias=True)
        fed = ops.dropout(down, "mlp dropout", c.residual.dropout)
        output = ops.add(ops.add(attended, fed, "block sum"), x, "layer output")
        self.tape.still_referenced(normed, attended, fed)
        return output

    def attention(self, x: Tensor) -> Tensor:
        """CodeGenAttention.forward; its variables reference their tensors until it returns."""
        c, ops = self.c, self.ops
        heads, scores_shape = ("b", "s", "h", "d_h"), ("b", "h", "s", c.keys)
        qkv = ops.linear(x, "attention.qkv_proj", ("3·d", "d"), ("b", "s", "3·d"), bias=False)
        q, v, k = ops.split(qkv, (heads, heads, heads), "q, v, k")
        q, k = ops.copy(q, "q by group"), ops.copy(k, "k by group")
        v = ops.copy(v, "v by group", reorders=True)
        tables = ops.table("sines and cosines", (*self.rows, "d_rot"), "fp32")
        parts = {name: ops.slices(x, ROTATED, name) for name, x in (("k", k), ("q", q))}
        rotated = {name: self.rotated(turning, name) for name, (turning, _) in parts.items()}
        joined: dict[str, Tensor] = {}
        for name, (_, passing) in parts.items():
            joined[name] = ops.concatenate((rotated[name], passing), heads, f"{name} joined")
        if c.cache is not None:
            before = joined["k"]
            joined["k"], v = cached(ops, c.cache, ops.cast(before, x.dtype), v)
            self.tape.still_referenced(before)
        dtype = c.dtypes.compute if c.dtypes.autocast else "fp32"
        k_cast, q_cast = (ops.cast(joined[name], dtype, f"{name} for the product") for name in ("k", "q"))
        q_read = ops.copy(q_cast, "q by head") if self.copies_queries else q_cast
        k_read = ops.copy(k_cast, "k by head") if self.copies_keys else k_cast
        scores = ops.matmul(q_read, k_read, "scores", scores_shape)
        self.tape.still_referenced(q_cast, k_cast)
        scores = ops.scale(ops.shift(scores, "masked scores", c.dtypes.embedded), "scaled scores")
        probabilities = ops.cast(ops.softmax(scores, "attention probabilities"), v.dtype, "probabilities in dtype")
        dropped = ops.dropout(probabilities, "attention probabilities dropout", c.attention.dropout)
        self.weights = (dropped,)
        v_read = ops.copy(v, "v by head") if self.copies_keys else v
        core = ops.matmul(dropped, v_read, "attention output", heads)
        core = self.by_token(core)
        attended = ops.linear(core, "attention.o_proj", ("d", "d"), ("b", "s", "d"), bias=False)
        attended = ops.dropout(attended, "attention dropout", c.residual.dropout)
        self.tape.still_referenced(qkv, q, k, v, tables, *rotated.values(), *joined.values())
        return attended

    def rotated(self, turning: Tensor, name: str, dtype: str = "fp32") -> Tensor:
        """apply_rotary_pos_emb; repeats the cos/sin cache for pairs of features, for q and k separately."""
        ops = self.ops
        half = (*turning.shape[:-1], "d_rot/2")
        sines, cosines = (ops.table(f"{name} {table}", (*self.rows, "d_rot"), dtype) for table in ("sines", "cosines"))
        straight = ops.mul(turning, cosines, f"{name} * cos")
        first, second = ops.slices(turning, (half, half), f"{name} pairs")
        pairs = ops.concatenate((ops.scale(second, f"{name} negated"), first), turning.shape, f"{name} pairs swapped")
        turned = ops.add(straight, ops.mul(pairs, sines, f"{name} swapped * sin"), f"rotated {name}")
        self.tape.still_referenced(sines, cosines)
        return turned
