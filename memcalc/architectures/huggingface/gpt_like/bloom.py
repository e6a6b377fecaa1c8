"""BLOOM: ALiBi added in the matmul of queries and keys, and a gelu with a custom backward."""

from __future__ import annotations

from memcalc.architectures.huggingface.modules.mlp import Mlps
from memcalc.architectures.kv_cache import cached
from memcalc.programs.tape import NEW, BackwardMemory, Node, Tensor


class Bloom(Mlps):
    """BloomBlock."""

    silent_after: tuple[str, ...] = ("attention.qkv_proj",)
    rotates = False
    positions_first = False  # modeling_bloom.py has no position ids: ALiBi's biases have the positions
    names_returned = True

    def embedding(self) -> Tensor:
        """Write the embedding with its norm, then ALiBi's biases and the mask."""
        x = self.token_embedding()
        self.tape.live.names.add(x.storage)  # variable inputs_embeds
        x = self.norm(x, "embed_norm", "d")
        self.shared_tables()
        return x

    def shared_tables(self) -> None:
        """Write ALiBi's slopes, the resulting biases, which are arguments of the layers, and the mask."""
        self.tape.live.names.add(self.shared_table("slopes", ("h",), "fp32").storage)
        self.name_argument(self.alibi().storage, stays=self.c.saving.checkpoints_layers)
        super().shared_tables()

    def alibi(self) -> Tensor:
        """Return ALiBi's bias, one row per head and sequence: in fp32 for each head, repeated, and cast."""
        rows, dtype = ("b", "h", self.c.keys), self.c.dtypes.embedded
        positions = self.shared_table("positions", (self.c.keys,), "int64")
        of_heads = self.shared_table("alibi of each head", ("h", self.c.keys), "fp32", positions)
        if dtype == "fp32":
            return self.shared_table("alibi", rows, dtype, of_heads)
        repeated = self.shared_table("alibi in fp32", rows, "fp32", of_heads)
        return self.shared_table("alibi", rows, dtype, repeated, of_heads)  # a variable has that of each head

    def layer(self) -> Tensor:
        """Attention, then the MLP; each adds its residual within the module."""
        c, ops = self.c, self.ops
        x = self.entry()
        normed = self.norm(x, "input_norm", "d")
        attended = self.attention(normed, x)
        again = self.norm(attended, "post_attention_norm", "d")
        self.tape.still_referenced(normed)
        up = ops.linear(again, "mlp.up_proj", ("4·d", "d"), ("b", "s", "4·d"), bias=True)
        inner = self.own_gelu(up)
        down = ops.linear(inner, "mlp.down_proj", ("d", "4·d"), ("b", "s", "d"), bias=True)
        output = ops.add(attended, ops.dropout(down, "mlp dropout", c.residual.dropout), "layer output")
        self.tape.still_referenced(down, inner, again)
        return output

    def attention(self, x: Tensor, residual: Tensor) -> Tensor:
        """BloomAttention.forward; its variables reference scores before and after the mask until it returns."""
        c, ops = self.c, self.ops
        heads = ("b", "s", "h", "d_h")
        qkv = ops.linear(x, "attention.qkv_proj", ("3·d", "d"), ("b", "s", "h", "3·d_h"), bias=True)
        q, k, v = ops.slices(qkv, (heads, heads, heads), "q, k, v")
        if c.cache is not None:
            k, v = cached(ops, c.cache, k, v)
        if self.copies_queries:
            q = ops.copy(q, "q by head")
        if self.copies_keys:
            k, v = ops.copy(k, "k by head"), ops.copy(v, "v by head")
        scores = ops.biased_matmul(self.given_alibi(), q, k, "scores", ("b", "h", "s", c.keys))
        masked = ops.shift(scores, "masked scores", c.dtypes.embedded)
        wide = ops.softmax(masked, "attention probabilities", "fp32")
        probabilities = ops.cast(wide, q.dtype, "probabilities in dtype")
        dropped = ops.dropout(probabilities, "attention probabilities dropout", c.attention.dropout)
        self.weights = (dropped,)
        core = ops.matmul(dropped, v, "attention output", heads)
        core = core if self.single_token else ops.copy(core, "attention output by token", reorders=True)
        y = ops.linear(core, "attention.o_proj", ("d", "d"), ("b", "s", "d"), bias=True)
        output = ops.add(residual, ops.dropout(y, "attention dropout", c.residual.dropout), "attention sum")
        self.tape.still_referenced(x, qkv, q, k, v, scores, masked, core, y)
        return output

    def given_alibi(self) -> Tensor:
        """Return ALiBi's bias as layers get it."""
        return Tensor(-1, ("b", "h", self.c.keys), self.c.dtypes.embedded, grad=False)

    def own_gelu(self, x: Tensor) -> Tensor:
        """GeLUFunction, which saves its input and calls bloom_gelu_forward and bloom_gelu_back, operator by operator.

        Forward: y = 0.5x (1 + tanh(0.798x (1 + 0.0447x x))), of which four results are live at once.
        """
        step = self.gelu_step
        half, scaled = step(x), step(x)
        inner = step(scaled, step(step(step(x), x)))
        factor = step(step(inner))
        y = self.tape.new("mlp.gelu", x.shape, x.dtype, self.citation)
        saved, prepares, last = (x.storage,), *self.gelu_backward(x)
        gradients = (NEW, None, None)
        node = Node(
            "mlp.gelu",
            (x, half, factor),
            (y,),
            saved,
            gradients,
            backward=BackwardMemory(prepares=prepares, between=last),
        )
        self.tape.record(node)
        return y

    def gelu_step(self, *read: Tensor) -> Tensor:
        """One operator of the forward, without a gradient."""
        y = self.tape.new("gelu, intermediate result", read[0].shape, read[0].dtype, self.citation, grad=False)
        self.tape.record(Node("mlp.gelu, one operator", read, (y,), (), (None,) * len(read)))
        return y

    def gelu_backward(self, x: Tensor) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        """Return what backward allocates and frees before the input's gradient, and what it frees after it.

        With t = tanh(0.798x (1 + 0.0447x x)): 0.5x ((1 - t t) (0.798 + 0.107x x)) + 0.5 (1 + t), times a gradient.
        """
        steps: list[tuple[int, int]] = []

        def made(*freed: int) -> int:
            number = self.tape.store("gelu backward, intermediate result", x.shape, x.dtype, self.citation)
            steps.append((number, 1))
            steps.extend((each, -1) for each in freed)
            return number

        scaled = made()
        tanh = made(made(scaled, made(made(made()))))
        half = made()
        rest = made(made())
        first = made(half, made(rest, made(made(made()))))
        total = made(first, made(made()))
        return tuple(steps), ((total, -1), (tanh, -1))
