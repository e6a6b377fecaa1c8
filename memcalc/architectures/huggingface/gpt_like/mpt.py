"""MPT: ALiBi added to scores in fp32, masking by torch.where, and no biases."""

from __future__ import annotations

from memcalc.architectures.huggingface.modules.mlp import Mlps
from memcalc.architectures.kv_cache import cached
from memcalc.programs.tape import Tensor


class Mpt(Mlps):
    """MptBlock."""

    silent_after: tuple[str, ...] = ("attention.o_proj",)
    rotates = False
    names_returned = True

    def norm(self, x: Tensor, module: str, width: str) -> Tensor:
        """PyTorch's LayerNorm without bias."""
        return self.ops.layer_norm(x, module, width, ("weight",))

    def shared_tables(self) -> None:
        """Write ALiBi's biases, for as many tokens as the model has positions, and the mask, which autograd saves."""
        positions = self.shared_table("positions", ("S",), "int32")
        alibi = self.shared_table("alibi", ("h", "S"), "fp32", positions)
        self.name_argument(alibi.storage, stays=self.c.saving.checkpoints_layers)
        truth = self.causal_truth("causal mask, truth")
        added = self.shared_table("causal mask to be added", self.mask, self.c.dtypes.embedded, truth)
        self.tape.hold(self.shared_table("causal mask", self.mask, "bool", added))

    def layer(self) -> Tensor:
        """Attention, then the MLP; its module adds the residual."""
        c, ops = self.c, self.ops
        x = self.entry()
        normed = self.norm(x, "input_norm", "d")
        attended = self.attention(normed)
        total = ops.add(ops.dropout(attended, "attention dropout", c.residual.dropout), x, "attention sum")
        again = self.norm(total, "post_attention_norm", "d")
        self.tape.still_referenced(normed)
        up = ops.linear(again, "mlp.up_proj", ("4·d", "d"), ("b", "s", "4·d"), bias=False)
        inner = self.act(up, "mlp.")
        down = ops.linear(inner, "mlp.down_proj", ("d", "4·d"), ("b", "s", "d"), bias=False)
        output = ops.add(ops.dropout(down, "mlp dropout", c.residual.dropout), total, "layer output")
        self.tape.still_referenced(attended, again, inner, down)
        return output

    def attention(self, x: Tensor) -> Tensor:
        """MptAttention.forward; a variable references masked scores until it returns."""
        c, ops = self.c, self.ops
        heads, whole = ("b", "s", "h", "d_h"), ("b", "s", "3·d")
        qkv = ops.linear(x, "attention.qkv_proj", ("3·d", "d"), whole, bias=False)
        q, k, v = ops.split(qkv, (heads, heads, heads), "q, k, v")
        q, v = (
            ops.restrided_view(q, "q"),
            ops.restrided_view(v, "v"),
        )  # the gradient of k is transposed, which is a view of rows
        if c.cache is not None:
            k, v = cached(ops, c.cache, k, v)
        read_q = ops.copy(q, "q by head") if self.copies_queries else q
        read_k = ops.copy(k, "k by head") if self.copies_keys else k
        scores = ops.scale(ops.matmul(read_q, read_k, "scores", ("b", "h", "s", c.keys)), "scaled scores")
        scores = ops.shift(scores, "scores + alibi", "fp32")
        masked = ops.where(scores, "masked scores", ("b", "s", c.keys))
        self.tape.reads("causal mask")
        probabilities = ops.cast(ops.softmax(masked, "attention probabilities"), v.dtype, "probabilities in dtype")
        dropped = ops.dropout(probabilities, "attention probabilities dropout", c.attention.dropout)
        self.weights = (dropped,)
        values = ops.copy(v, "v by head") if self.copies_keys else v
        core = ops.matmul(dropped, values, "attention output", heads)
        by_token = self.by_token(core)
        y = ops.linear(by_token, "attention.o_proj", ("d", "d"), ("b", "s", "d"), bias=False)
        self.tape.still_referenced(x, qkv, masked, by_token)
        return y
