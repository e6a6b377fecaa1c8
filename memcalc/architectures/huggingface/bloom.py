"""BLOOM: ALiBi added in the matmul of queries and keys, and a gelu with a custom backward."""

from __future__ import annotations

from memcalc.architectures.huggingface.modules.mlp import Mlps
from memcalc.programs.tape import NEW, Node, Tensor


class Bloom(Mlps):
    """BloomBlock."""

    silent_after: tuple[str, ...] = ("attention.qkv_proj",)
    rotates = False
    positions_first = False  # modeling_bloom.py has no position ids: ALiBi's biases have the positions
    names_returned = True

    def first_hidden(self, x: Tensor) -> Tensor:
        """word_embeddings_layernorm."""
        return self.norm(x, "embed_norm", "d")

    def shared_tables(self) -> None:
        """Write the mask, ALiBi's slopes, and the resulting biases, which are arguments of the layers."""
        super().shared_tables()
        self.tape.names.add(self.shared_table("slopes", ("h",), "fp32").storage)
        self.name_table(self.alibi())

    def alibi(self) -> Tensor:
        """Return ALiBi's bias, one row per head and sequence."""
        return self.shared_table("alibi", ("b", "h", "s"), self.c.embedded)

    def layer(self) -> Tensor:
        """Attention, then the MLP; each adds its residual within the module."""
        c, ops = self.c, self.ops
        x = self.entry()
        normed = self.norm(x, "input_norm", "d")
        attended = self.attention(normed, x)
        again = self.norm(attended, "post_attention_norm", "d")
        self.tape.still_referenced(normed)
        up = ops.linear(again, "mlp.up_proj", ("4·d", "d"), ("b", "s", "4·d"), bias=True)
        down = ops.linear(self.own_gelu(up), "mlp.down_proj", ("d", "4·d"), ("b", "s", "d"), bias=True)
        output = ops.add(attended, ops.dropout(down, "mlp dropout", c.residual_dropout), "layer output")
        self.tape.still_referenced(down, again)
        return output

    def attention(self, x: Tensor, residual: Tensor) -> Tensor:
        """BloomAttention.forward; its variables reference scores before and after the mask until it returns."""
        c, ops = self.c, self.ops
        heads = ("b", "s", "h", "d_h")
        qkv = ops.linear(x, "attention.qkv_proj", ("3·d", "d"), ("b", "s", "h", "3·d_h"), bias=True)
        q, k, v = ops.slices(qkv, (heads, heads, heads), "q, k, v")
        if c.batched:
            q, k, v = ops.copy(q, "q by head"), ops.copy(k, "k by head"), ops.copy(v, "v by head")
        scores = ops.biased_matmul(self.given_alibi(), q, k, "scores", ("b", "h", "s", "s"))
        masked = ops.shift(scores, "masked scores", c.embedded)
        wide = ops.softmax(masked, "attention probabilities", "fp32")
        probabilities = ops.cast(wide, q.dtype, "probabilities in dtype")
        dropped = ops.dropout(probabilities, "attention probabilities dropout", c.attention_dropout)
        self.weights = (dropped,)
        core = ops.copy(ops.matmul(dropped, v, "attention output", heads), "attention output by token", reorders=True)
        y = ops.linear(core, "attention.o_proj", ("d", "d"), ("b", "s", "d"), bias=True)
        output = ops.add(residual, ops.dropout(y, "attention dropout", c.residual_dropout), "attention sum")
        self.tape.still_referenced(x, qkv, q, k, v, scores, masked, core, y)
        return output

    def given_alibi(self) -> Tensor:
        """Return ALiBi's bias as layers get it."""
        return Tensor(-1, ("b", "h", "s"), self.c.embedded, grad=False)

    def own_gelu(self, x: Tensor) -> Tensor:
        """GeLUFunction; saves its input. Forward has nine operators, backward 17, with four and five live at once."""
        tape = self.tape
        y = tape.new("mlp.gelu", x.shape, x.dtype, self.citation)
        ahead = tuple(tape.store(f"gelu, step {n}", x.shape, x.dtype, self.citation) for n in range(3))
        back = tuple(tape.store(f"gelu backward, step {n}", x.shape, x.dtype, self.citation) for n in range(5))
        steps = (*((each, 1) for each in back), *((each, -1) for each in back))
        node = Node("mlp.gelu", (x,), (y,), (x.storage,), (NEW,), forward_temporaries=ahead, prepares=steps)
        tape.record(node)
        return y
