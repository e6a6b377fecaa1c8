"""What transformers' modules run, operator by operator (transformers 5.23, models/<family>/modeling_<family>.py)."""

from __future__ import annotations

from memcalc.estimation.blocks.caching import cached, cached_attention, write_mask, write_next_token
from memcalc.estimation.blocks.losses import write_loss
from memcalc.estimation.blocks.structure import Structure
from memcalc.estimation.operators import Operators
from memcalc.estimation.tape import Tape, Tensor
from memcalc.ledger.component import Component

FAMILIES = ("codegen", "gpt2", "llama", "mistral", "qwen2", "qwen3")

_SOURCE = "transformers 5.23 modeling_{}.py"


def write(c: Structure, part: str) -> tuple[Tape, Tensor | None]:
    """The tape of one part of a family's model, and its output."""
    if part == "embedding":
        return _embedding(c)
    if part == "head":
        return _head(c)
    block = _LAYERS.get(c.family, _Llama)(c)
    tape, output = block.layer()
    assert tape.entry is not None
    # The model's loop over layers holds a layer's input until it returns, and the layer what attention returns.
    tape.still_named(tape.entry, *block.weights)
    return tape, output


def _embedding(c: Structure) -> tuple[Tape, Tensor]:
    tape = Tape()
    ops = Operators(tape, c.compute, c.parameters, c.autocast, c.adapters)
    shared_tables(tape, c)
    x = ops.embedding("embed_tokens", ("V", "d"), ("b", "s"), tied=c.tied, view=c.head_gradient_is_a_view)
    if c.position == "learned":
        positions = ops.embedding("embed_positions", ("S", "d"), ("s",), counts=True)
        tape.names.update((x.storage, positions.storage))  # inputs_embeds and position_embeds keep their names
        x = ops.broadcast_add(x, positions, "embedding sum")
    else:
        tape.names.add(x.storage)  # inputs_embeds
    return tape, ops.dropout(x, "embedding dropout", c.embedding_dropout)


def shared_tables(tape: Tape, c: Structure) -> None:
    """The mask and the rotary tables, made once in each forward and shared by all layers."""
    write_mask(tape, c)
    citation = _SOURCE.format(c.family)
    if c.attention == "eager":
        # masking_utils.py: an additive mask in the dtype of the embeddings; the sum with the scores does not keep it
        mask = tape.store("causal mask", ("b", "s", c.keys), c.parameters, citation, component=Component.TEMPORARIES)
        tape.names.add(mask)
    if c.family not in ("gpt2", "codegen"):
        for name in ("cosines", "sines"):
            table = tape.store(name, ("s", "d_h"), c.parameters, citation, component=Component.TEMPORARIES)
            tape.held.add(table)


def _head(c: Structure) -> tuple[Tape, None]:
    tape = Tape(kind=Component.LOGITS_AND_LOSS)
    block = _Family(c, tape)
    ops = block.ops
    x = tape.input("head input", ("b", "s", "d"), c.parameters, _SOURCE.format(c.family))
    given = x
    x = ops.layer_norm(x, "norm", "d") if c.normalization == "layernorm" else block.rms_norm(x, "norm", "d")
    tape.still_named(given)
    if c.cache is not None:
        write_next_token(ops, c, x, "d")
    else:
        write_loss(ops, c, x, "d", wide_logits=c.family == "codegen")
    return tape, None


class _Family:
    """What the families share."""

    def __init__(self, c: Structure, tape: Tape | None = None) -> None:
        self.c = c
        self.weights: tuple[Tensor, ...] = ()  # of attention, returned where they exist and nothing trains
        self.tape = tape or Tape()
        self.ops = Operators(self.tape, c.compute, c.parameters, c.autocast, c.adapters)

    def entry(self) -> Tensor:
        dtype, citation = self.c.parameters, _SOURCE.format(self.c.family)
        return self.tape.input("layer input", ("b", "s", "d"), dtype, citation, grad=not self.c.detached)

    def rms_norm(self, x: Tensor, module: str, width: str) -> Tensor:
        """LlamaRMSNorm: in fp32, then weight * normed in the input's dtype."""
        return self.ops.composite_rms_norm(x, module, width, named=True)

    def new_gelu(self, x: Tensor) -> Tensor:
        """NewGELUActivation: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), eight operators."""
        ops = self.ops
        half = ops.scale(x, "gelu x/2")
        cube = ops.scale(ops.pow(x, "gelu x^3"), "gelu 0.044715 x^3")
        inner = ops.scale(ops.add(x, cube, "gelu sum"), "gelu argument")
        factor = ops.shift(ops.pointwise(inner, "gelu tanh", saves="output"), "gelu 1 + tanh")
        return ops.mul(half, factor, "gelu output")

    def scaled_dot_product(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """integrations/sdpa_attention.py: grouped heads go to flash as they are; others are repeated."""
        c, ops = self.c, self.ops
        if c.cache is not None:
            return cached_attention(ops, c, q, k, v, ("h", "h_kv", "d_h"))
        if c.attention == "flash":
            return ops.flash_attention(q, k, v, "h", "h_kv", "d_h", "s", splits=not c.attention_dropout)
        if c.grouped:
            heads = ("b", "s", "h", "d_h")
            k, v = ops.copy(k, "k for each head", heads), ops.copy(v, "v for each head", heads)
        return ops.efficient_attention(q, k, v, "h", "d_h", "s")

    def eager(self, q: Tensor, k: Tensor, v: Tensor, *, softmax_in_fp32: bool) -> Tensor:
        """eager_attention_forward of gpt2 and llama."""
        c, ops = self.c, self.ops
        heads, keys, scores_shape = ("b", "s", "h", "d_h"), ("b", c.keys, "h", "d_h"), ("b", "h", "s", c.keys)
        if c.grouped:
            k, v = ops.copy(k, "k for each head", keys), ops.copy(v, "v for each head", keys)
        if c.batched:
            q = ops.copy(q, "q by head")
            k = k if c.grouped else ops.copy(k, "k by head")
        scores = ops.scale(ops.matmul(q, k, "scores", scores_shape), "scaled scores")
        scores = ops.shift(scores, "masked scores")
        dtype = scores.dtype
        if softmax_in_fp32:
            scores = ops.cast(scores, "fp32", "scores in fp32")
        probabilities = ops.cast(ops.softmax(scores, "attention probabilities"), dtype, "probabilities in dtype")
        dropped = ops.dropout(probabilities, "attention probabilities dropout", c.attention_dropout)
        if c.batched and not c.grouped:
            v = ops.copy(v, "v by head")
        self.weights = (dropped,) if c.cache is not None else ()
        return ops.copy(ops.matmul(dropped, v, "attention output", heads), "attention output by token")

    def layer(self) -> tuple[Tape, Tensor]:
        """The tape of a layer, and its output."""
        raise NotImplementedError  # each family writes its own


class _Gpt2(_Family):
    """GPT2Block."""

    def layer(self) -> tuple[Tape, Tensor]:
        c, ops = self.c, self.ops
        x = self.entry()
        normed = ops.layer_norm(x, "input_norm", "d")
        qkv = ops.linear(normed, "attention.qkv_proj", ("3·d", "d"), ("b", "s", "3·d"), bias=True)
        heads = ("b", "s", "h", "d_h")
        q, k, v = ops.split(qkv, (heads, heads, heads), "q, k, v")
        if c.cache is not None:
            k, v = cached(ops, c.cache, k, v)
        core = (
            self.eager(q, k, v, softmax_in_fp32=False) if c.attention == "eager" else self.scaled_dot_product(q, k, v)
        )
        attended = ops.linear(core, "attention.o_proj", ("d", "d"), ("b", "s", "d"), bias=True)
        attended = ops.dropout(attended, "attention dropout", c.residual_dropout)
        self.tape.still_named(normed, q, k, v)
        x = ops.add(attended, x, "attention sum")
        normed = ops.layer_norm(x, "post_attention_norm", "d")
        inner = "4·d" if c.usual_width else "F"
        up = ops.linear(normed, "mlp.up_proj", (inner, "d"), ("b", "s", inner), bias=True)
        down = ops.linear(self.new_gelu(up), "mlp.down_proj", ("d", inner), ("b", "s", "d"), bias=True)
        fed = ops.dropout(down, "mlp dropout", c.residual_dropout)
        output = ops.add(x, fed, "layer output")
        self.tape.still_named(normed, *(() if c.cache is None else (attended,)))  # autograd drops attn_output sooner
        return self.tape, output


class _CodeGen(_Family):
    """CodeGenBlock: rotates a part of each head, attends in fp32, attention and MLP side by side."""

    def layer(self) -> tuple[Tape, Tensor]:
        c, ops = self.c, self.ops
        x = self.entry()
        normed = ops.layer_norm(x, "input_norm", "d")
        attended = ops.dropout(self.attention(normed), "attention dropout", c.residual_dropout)
        inner = "4·d" if c.usual_width else "F"
        up = ops.linear(normed, "mlp.up_proj", (inner, "d"), ("b", "s", inner), bias=True)
        down = ops.linear(self.new_gelu(up), "mlp.down_proj", ("d", inner), ("b", "s", "d"), bias=True)
        fed = ops.dropout(down, "mlp dropout", c.residual_dropout)
        return self.tape, ops.add(ops.add(attended, fed, "block sum"), x, "layer output")

    def attention(self, x: Tensor) -> Tensor:
        c, ops = self.c, self.ops
        heads = ("b", "s", "h", "d_h")
        qkv = ops.linear(x, "attention.qkv_proj", ("3·d", "d"), ("b", "s", "3·d"), bias=False)
        q, v, k = ops.split(qkv, (heads, heads, heads), "q, v, k")
        k, q = self.rotated(k, "k"), self.rotated(q, "q")
        q, k = ops.cast(q, "fp32", "q in fp32"), ops.cast(k, "fp32", "k in fp32")
        if c.batched:
            q, k = ops.copy(q, "q by head"), ops.copy(k, "k by head")
        scores = ops.matmul(q, k, "scores", ("b", "h", "s", "s"))
        scores = ops.scale(ops.shift(scores, "masked scores"), "scaled scores")
        probabilities = ops.cast(ops.softmax(scores, "attention probabilities"), v.dtype, "probabilities in dtype")
        dropped = ops.dropout(probabilities, "attention probabilities dropout", c.attention_dropout)
        core = ops.matmul(dropped, ops.copy(v, "v by head"), "attention output", heads)
        core = ops.copy(core, "attention output by token")
        return ops.linear(core, "attention.o_proj", ("d", "d"), ("b", "s", "d"), bias=False)

    def rotated(self, x: Tensor, name: str) -> Tensor:
        """The first rotary_dim features of each head are rotated, with fp32 tables, the others joined to them again.

        The layer keeps a sine and a cosine table for each of q and k, repeated for pairs of features.
        """
        ops = self.ops
        turning, passing = ops.slices(x, (("b", "s", "h", "d_rot"), ("b", "s", "h", "d_h-d_rot")), name)
        straight = ops.mul_table(turning, f"{name} * cos", "fp32")
        turned = ops.mul_table(ops.copy(turning, f"{name} pairs swapped"), f"{name} swapped * sin", "fp32")
        for table in ("cosines", "sines"):
            ops.keep(turned, f"{name} {table}", ("s", "d_rot"), "fp32")
        return ops.concatenate((ops.add(straight, turned, f"rotated {name}"), passing), x.shape, f"{name} joined")


class _Llama(_Family):
    """LlamaDecoderLayer and the families that copy it (mistral, qwen2, qwen3)."""

    def layer(self) -> tuple[Tape, Tensor]:
        c, ops = self.c, self.ops
        x = self.entry()
        normed = self.rms_norm(x, "input_norm", "d")
        attended = self.attention(normed)
        self.tape.still_named(normed)
        x = ops.add(x, attended, "attention sum")
        normed = self.rms_norm(x, "post_attention_norm", "d")
        inner = "4·d" if c.usual_width else "F"
        gate = ops.linear(normed, "mlp.gate_proj", (inner, "d"), ("b", "s", inner), bias=c.mlp_bias)
        gate = ops.pointwise(gate, "mlp.silu")
        up = ops.linear(normed, "mlp.up_proj", (inner, "d"), ("b", "s", inner), bias=c.mlp_bias)
        product = ops.mul(gate, up, "mlp.silu(gate) * up")
        down = ops.linear(product, "mlp.down_proj", ("d", inner), ("b", "s", "d"), bias=c.mlp_bias)
        self.tape.still_named(normed)
        return self.tape, ops.add(x, down, "layer output")

    def attention(self, x: Tensor) -> Tensor:
        c, ops = self.c, self.ops
        q_width = "d" if c.square else "h·d_h"
        kv_width = q_width if not c.grouped else "h_kv·d_h"
        kv_heads = "h_kv" if c.grouped else "h"
        parts = {}
        for name, width, heads in (("q", q_width, "h"), ("k", kv_width, kv_heads), ("v", kv_width, kv_heads)):
            out = ("b", "s", heads, "d_h")
            parts[name] = ops.linear(x, f"attention.{name}_proj", (width, "d"), out, bias=c.qkv_bias)
            if c.qk_norm and name != "v":
                parts[name] = self.rms_norm(parts[name], f"attention.{name}_norm", "d_h")
        q, k, v = self.rotated(parts["q"], "q"), self.rotated(parts["k"], "k"), parts["v"]
        self.tape.still_named(parts["q"], parts["k"])
        if c.cache is not None:
            k, v = cached(ops, c.cache, k, v)
        core = self.eager(q, k, v, softmax_in_fp32=True) if c.attention == "eager" else self.scaled_dot_product(q, k, v)
        y = ops.linear(core, "attention.o_proj", ("d", q_width), ("b", "s", "d"), bias=c.output_bias)
        self.tape.still_named(q, k, v)
        return y

    def rotated(self, x: Tensor, name: str) -> Tensor:
        """apply_rotary_pos_emb: x * cos + rotate_half(x) * sin."""
        c, ops = self.c, self.ops
        half = (*x.shape[:-1], "d_h/2")
        straight = ops.mul_table(x, f"{name} * cos", c.parameters)
        first, second = ops.slices(x, (half, half), f"{name} halves")
        turned = ops.concatenate((ops.scale(second, f"-{name} half"), first), x.shape, f"turned {name}")
        return ops.add(straight, ops.mul_table(turned, f"turned {name} * sin", c.parameters), f"rotated {name}")


_LAYERS: dict[str, type[_Family]] = {"gpt2": _Gpt2, "codegen": _CodeGen}
