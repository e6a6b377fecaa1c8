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
    ops.float8 = c.float8
    x = ops.embedding("embed_tokens", ("V", "d"), ("b", "s"), tied=c.tied, view=c.head_gradient_is_a_view)
    if c.position == "learned":
        positions = ops.embedding("embed_positions", ("S", "d"), ("s",), counts=True)
        tape.names.update((x.storage, positions.storage))  # inputs_embeds and position_embeds keep their names
        x = ops.broadcast_add(x, positions, "embedding sum")
    else:
        tape.names.add(x.storage)  # inputs_embeds
    shared_tables(ops, c)
    return tape, ops.dropout(x, "embedding dropout", c.embedding_dropout)


def shared_tables(ops: Operators, c: Structure) -> None:
    """The mask and the rotary tables, made once in each forward and shared by all layers."""
    write_mask(ops.tape, c)
    citation = _SOURCE.format(c.family)
    if c.attention == "eager":
        # masking_utils.py: an additive mask in the dtype of the embeddings; the sum with the scores does not keep it
        mask = ops.table("causal mask", ("b", "s", c.keys), c.parameters, citation, Component.TEMPORARIES)
        if c.checkpoints_layers:  # torch/utils/checkpoint.py: the function that runs again has its arguments
            ops.tape.hold(mask)
        else:
            ops.tape.names.add(mask.storage)
    if c.checkpoints_layers and c.family not in ("gpt2", "codegen"):
        ops.tape.hold(ops.table("position ids", ("s",), "int64", citation, Component.TEMPORARIES))
    if c.family not in ("gpt2", "codegen"):
        for name in ("cosines", "sines"):
            ops.tape.hold(ops.table(name, ("s", "d_h"), c.parameters, citation, Component.TEMPORARIES))


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
        self.weights: tuple[Tensor, ...] = ()  # of attention, returned where they exist
        self.tape = tape or Tape()
        self.ops = Operators(self.tape, c.compute, c.parameters, c.autocast, c.adapters)
        self.ops.float8 = c.float8

    def entry(self) -> Tensor:
        dtype, citation = self.c.parameters, _SOURCE.format(self.c.family)
        return self.tape.input("layer input", ("b", "s", "d"), dtype, citation, grad=not self.c.detached)

    def rms_norm(self, x: Tensor, module: str, width: str) -> Tensor:
        """LlamaRMSNorm: in fp32, then weight * normed in the input's dtype."""
        if self.c.liger:
            return self.ops.liger_rms_norm(x, module, width)
        return self.ops.composite_rms_norm(x, module, width, named=True)

    def new_gelu(self, x: Tensor) -> Tensor:
        """NewGELUActivation: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), eight operators."""
        ops = self.ops
        half = ops.scale(x, "gelu x/2")
        cube = ops.scale(ops.pow(x, "gelu x^3"), "gelu 0.044715 x^3")
        inner = ops.scale(ops.add(x, cube, "gelu sum"), "gelu argument")
        factor = ops.shift(ops.pointwise(inner, "gelu tanh", saves="output"), "gelu 1 + tanh")
        output = ops.mul(half, factor, "gelu output")
        self.tape.still_named(x)
        return output

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
        masked = scores = ops.shift(scores, "masked scores")
        wide = ops.softmax(scores, "attention probabilities", "fp32" if softmax_in_fp32 else "")
        probabilities = ops.cast(wide, masked.dtype, "probabilities in dtype")
        if softmax_in_fp32:
            self.tape.still_named(masked)  # attn_weights, until they are probabilities in dtype
        dropped = ops.dropout(probabilities, "attention probabilities dropout", c.attention_dropout)
        values = ops.copy(v, "v by head") if c.batched and not c.grouped else v
        self.weights = (dropped,)
        core = ops.matmul(dropped, values, "attention output", heads)
        by_token = ops.copy(core, "attention output by token", reorders=c.batched)
        if c.grouped:
            self.tape.still_named(k, v)  # key_states, value_states
        return by_token

    def layer(self) -> tuple[Tape, Tensor]:
        """The tape of a layer, and its output."""
        raise NotImplementedError  # each family writes its own


class _Gpt2(_Family):
    """GPT2Block."""

    def layer(self) -> tuple[Tape, Tensor]:
        c, ops = self.c, self.ops
        x = self.entry()
        normed = ops.layer_norm(x, "input_norm", "d")
        qkv = ops.linear(normed, "attention.qkv_proj", ("3·d", "d"), ("b", "s", "3·d"), bias=True, conv1d=True)
        heads = ("b", "s", "h", "d_h")
        q, k, v = ops.split(qkv, (heads, heads, heads), "q, k, v")
        if c.cache is not None:
            k, v = cached(ops, c.cache, k, v)
        if c.attention == "eager":  # gradients come head by head; that of k transposed, which is a view of rows
            v, q = ops.seen(v, "v"), ops.seen(q, "q")
        core = (
            self.eager(q, k, v, softmax_in_fp32=False) if c.attention == "eager" else self.scaled_dot_product(q, k, v)
        )
        attended = ops.linear(core, "attention.o_proj", ("d", "d"), ("b", "s", "d"), bias=True, conv1d=True)
        attended = ops.dropout(attended, "attention dropout", c.residual_dropout)
        self.tape.still_named(normed, q, k, v)
        x = ops.add(attended, x, "attention sum")
        normed = ops.layer_norm(x, "post_attention_norm", "d")
        inner = "4·d" if c.usual_width else "F"
        up = ops.linear(normed, "mlp.up_proj", (inner, "d"), ("b", "s", inner), bias=True, conv1d=True)
        down = ops.linear(self.new_gelu(up), "mlp.down_proj", ("d", inner), ("b", "s", "d"), bias=True, conv1d=True)
        fed = ops.dropout(down, "mlp dropout", c.residual_dropout)
        output = ops.add(x, fed, "layer output")
        self.tape.still_named(normed, attended)
        return self.tape, output


_ROTATED = (("b", "s", "h", "d_rot"), ("b", "s", "h", "d_h-d_rot"))


class _CodeGen(_Family):
    """CodeGenBlock: rotates a part of each head, attends in fp32, attention and MLP side by side."""

    def layer(self) -> tuple[Tape, Tensor]:
        c, ops = self.c, self.ops
        x = self.entry()
        normed = ops.layer_norm(x, "input_norm", "d")
        attended = self.attention(normed)
        inner = "4·d" if c.usual_width else "F"
        up = ops.linear(normed, "mlp.up_proj", (inner, "d"), ("b", "s", inner), bias=True)
        down = ops.linear(self.new_gelu(up), "mlp.down_proj", ("d", inner), ("b", "s", "d"), bias=True)
        fed = ops.dropout(down, "mlp dropout", c.residual_dropout)
        output = ops.add(ops.add(attended, fed, "block sum"), x, "layer output")
        self.tape.still_named(normed, attended, fed)
        return self.tape, output

    def attention(self, x: Tensor) -> Tensor:
        """CodeGenAttention.forward, whose variables hold what it has made until it returns."""
        c, ops = self.c, self.ops
        heads, scores_shape = ("b", "s", "h", "d_h"), ("b", "h", "s", "s")
        qkv = ops.linear(x, "attention.qkv_proj", ("3·d", "d"), ("b", "s", "3·d"), bias=False)
        q, v, k = ops.split(qkv, (heads, heads, heads), "q, v, k")
        q, k = ops.copy(q, "q by group"), ops.copy(k, "k by group")
        v = ops.copy(v, "v by group", reorders=True)
        tables = ops.table("sines and cosines", ("s", "d_rot"), "fp32")
        parts = {name: ops.slices(x, _ROTATED, name) for name, x in (("k", k), ("q", q))}
        rotated = {name: self.rotated(turning, name) for name, (turning, _) in parts.items()}
        joined: dict[str, Tensor] = {}
        for name, (_, passing) in parts.items():
            # Autocast's cat wants one dtype; without it the kernel reads both.
            beside = ops.cast(passing, "fp32", f"{name} passed in fp32") if c.autocast else passing
            joined[name] = ops.concatenate((rotated[name], beside), heads, f"{name} joined")
        dtype = c.compute if c.autocast else "fp32"
        k_cast, q_cast = (ops.cast(joined[name], dtype, f"{name} for the product") for name in ("k", "q"))
        if c.batched:
            q_read, k_read = ops.copy(q_cast, "q by head"), ops.copy(k_cast, "k by head")
        else:
            q_read, k_read = q_cast, k_cast
        scores = ops.matmul(q_read, k_read, "scores", scores_shape)
        self.tape.still_named(q_cast, k_cast)
        scores = ops.scale(ops.shift(scores, "masked scores", c.parameters), "scaled scores")
        probabilities = ops.cast(ops.softmax(scores, "attention probabilities"), v.dtype, "probabilities in dtype")
        dropped = ops.dropout(probabilities, "attention probabilities dropout", c.attention_dropout)
        v_read = ops.copy(v, "v by head") if c.batched else v
        core = ops.matmul(dropped, v_read, "attention output", heads)
        core = ops.copy(core, "attention output by token", reorders=c.batched)
        attended = ops.linear(core, "attention.o_proj", ("d", "d"), ("b", "s", "d"), bias=False)
        attended = ops.dropout(attended, "attention dropout", c.residual_dropout)
        self.tape.still_named(qkv, q, k, v, tables, *rotated.values(), *joined.values())
        return attended

    def rotated(self, turning: Tensor, name: str) -> Tensor:
        """apply_rotary_pos_emb, with fp32 tables that are repeated for pairs of features, for each of q and k anew."""
        ops = self.ops
        half = (*turning.shape[:-1], "d_rot/2")
        sines, cosines = (ops.table(f"{name} {table}", ("s", "d_rot"), "fp32") for table in ("sines", "cosines"))
        straight = ops.mul(turning, cosines, f"{name} * cos")
        first, second = ops.slices(turning, (half, half), f"{name} pairs")
        pairs = ops.concatenate((ops.scale(second, f"{name} negated"), first), turning.shape, f"{name} pairs swapped")
        return ops.add(straight, ops.mul(pairs, sines, f"{name} swapped * sin"), f"rotated {name}")


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
        gate = gate if c.liger else ops.pointwise(gate, "mlp.silu")
        up = ops.linear(normed, "mlp.up_proj", (inner, "d"), ("b", "s", inner), bias=c.mlp_bias)
        multiplied = ops.liger_swiglu if c.liger else ops.mul
        product = multiplied(gate, up, "mlp.silu(gate) * up")
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
            if c.attention == "eager":
                parts[name] = ops.seen(parts[name], name)
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
        if c.liger:
            return ops.liger_rope(x, name)
        half = (*x.shape[:-1], "d_h/2")
        straight = ops.mul_table(x, f"{name} * cos", c.parameters)
        first, second = ops.slices(x, (half, half), f"{name} halves")
        turned = ops.concatenate((ops.scale(second, f"-{name} half"), first), x.shape, f"turned {name}")
        return ops.add(straight, ops.mul_table(turned, f"turned {name} * sin", c.parameters), f"rotated {name}")


_LAYERS: dict[str, type[_Family]] = {"gpt2": _Gpt2, "codegen": _CodeGen}
