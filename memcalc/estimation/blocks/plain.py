"""The plain implementation on a tape: the reference decoder (memcalc/step/decoder.py), operator by operator.

A GPT layer sums to the 34bsd + 5bs²h bytes of Korthikanti et al. (arXiv 2205.05198), section 4.1, plus the statistics
of its norms; with tensor and sequence parallelism to their table 2.
"""

from __future__ import annotations

from memcalc.estimation.blocks.caching import cached, cached_attention, write_mask, write_next_token
from memcalc.estimation.blocks.grouped_experts import grouped_products
from memcalc.estimation.blocks.losses import write_loss
from memcalc.estimation.blocks.splitting import Splitting
from memcalc.estimation.blocks.structure import Structure
from memcalc.estimation.operators import Operators
from memcalc.estimation.tape import Shape, Tape, Tensor
from memcalc.ledger.component import Component

PAPER = "Korthikanti et al. (arXiv 2205.05198) section 4.1"


class PlainBlock:
    """Writes one layer; `axis` names what tensor parallelism splits.

    Args:
        structure: the choices.
        experts: whether this layer's MLP is a mixture of experts.
    """

    def __init__(self, structure: Structure, *, experts: bool) -> None:
        self.c = structure
        self.experts = experts
        self.weights: tuple[Tensor, ...] = ()  # of attention, which transformers' modules return
        self.tape = Tape()
        self.ops = Operators(self.tape, structure.compute, structure.parameters, structure.autocast, structure.adapters)
        self.ops.float8 = structure.float8
        self.split = Splitting(self.ops, structure)
        self.stream = self.split.stream

    def axis(self, name: str) -> str:
        """The axis as one tensor-parallel rank has it."""
        return f"{name}/t" if self.c.split else name

    def layer(self) -> tuple[Tape, Tensor]:
        """The tape of a layer, and its output."""
        c, ops = self.c, self.ops
        dtype = c.parameters if c.autocast else c.compute
        x = self.tape.input("layer input", ("b", self.stream, "d"), dtype, PAPER, grad=not c.detached)
        before = c.norms_per_layer == 4 or c.norm_placement == "before"
        normed = self.norm(x, "input_norm") if before else x
        attended = self.attention(normed)
        if c.norms_per_layer == 4 or not before:
            attended = self.norm(attended, "attention_output_norm")
        attended = ops.dropout(attended, "attention dropout", c.residual_dropout)
        self.split.returned(normed)
        if c.implementation == "huggingface" and c.parallel_block:
            return self.tape, self.side_by_side(x, normed, attended)
        into = ops.add(x, attended, "attention sum")
        given = x if c.parallel_block else into
        named = (normed, attended) if c.parallel_block else ()  # until the layer returns
        if not before:
            normed = given
        elif c.norms_per_layer > 1:
            normed = self.norm(given, "post_attention_norm")
        fed = self.mlp(normed)
        if c.norms_per_layer == 4 or not before:
            fed = self.norm(fed, "mlp_output_norm")
        fed = ops.dropout(fed, "mlp dropout", c.residual_dropout)
        self.split.returned(normed)
        output = ops.add(into, fed, "layer output")
        self.split.returned(*named)
        if c.implementation == "huggingface":
            self.split.returned(x, *self.weights)  # the model's loop holds the input, the layer what attention returns
        return self.tape, output

    def side_by_side(self, x: Tensor, normed: Tensor, attended: Tensor) -> Tensor:
        """transformers' parallel blocks: three summands, added when all are there."""
        given = normed if self.c.norms_per_layer == 1 else self.norm(x, "post_attention_norm")
        fed = self.mlp(given)
        output = self.ops.add(self.ops.add(x, attended, "attention sum"), fed, "layer output")
        self.split.returned(x, normed, attended, given, *self.weights)
        return output

    def norm(self, x: Tensor, module: str, width: str = "d") -> Tensor:
        """LayerNorm or RMSNorm."""
        return norm(self.ops, self.c, x, module, width)

    # -- attention ---------------------------------------------------------------------------------------------------

    def attention(self, x: Tensor) -> Tensor:
        """Projection, core, output projection."""
        x = self.split.module_input(x, "attention")
        if self.c.mla:
            return self.latent_attention(x)
        c, ops = self.c, self.ops
        h, kv = self.axis("h"), self.axis("h_kv")
        by_head: tuple[Shape, Shape, Shape] = (("b", "s", h, "d_h"), ("b", "s", kv, "d_h"), ("b", "s", kv, "d_h"))
        shapes = by_head
        if c.qk_norm and c.qk_norm_width == "all-heads":
            q_width, kv_width = self.axis("d" if c.square else "h·d_h"), self.axis("h_kv·d_h")
            shapes = (("b", "s", q_width), ("b", "s", kv_width), by_head[2])
        q, k, v = self.projected(x, shapes)
        if c.attention_sinks:
            ops.unwritten_parameter("attention.sinks", "weight", (h,))
        if c.qk_norm:
            q = self.head_norm(q, "attention.q_norm", self.axis("d" if c.square else "h·d_h"), by_head[0])
            k = self.head_norm(k, "attention.k_norm", self.axis("h_kv·d_h"), by_head[1])
        else:
            q, k, v = self.by_head(q, k, v)
        if not c.qk_norm and c.position == "rope" and c.fused_qkv:
            v = ops.copy(v, "v")
        if c.position == "rope":
            straight = (q, k)
            q, k = self.rotated(q, "q"), self.rotated(k, "k")
            self.tape.still_named(*straight)
        if c.cache is not None:
            k, v = cached(ops, c.cache, k, v)
        core = self.eager_core(q, k, v) if c.attention == "eager" else self.fused_core(q, k, v)
        if c.selective:
            self.tape.recompute(core, (q, k, v))
        eager, by_token = c.attention == "eager", core
        if eager or c.pads_heads:
            by_token = ops.copy(core, "attention output by token", reorders=eager)
        query_width = self.axis("d" if c.square else "h·d_h")
        out = self.split.row(by_token, "attention.o_proj", ("d", query_width), bias=c.output_bias)
        self.split.returned(x, q, k, v, core)
        return out

    def projected(self, x: Tensor, shapes: tuple[Shape, Shape, Shape]) -> tuple[Tensor, ...]:
        """Queries, keys and values: views of one product, or of one each where adapters stand beside them."""
        c, ops = self.c, self.ops
        if c.fused_qkv:
            width = self.axis("3·d" if not c.grouped and c.square else "(h+2·h_kv)·d_h")
            qkv = self.split.column(x, "attention.qkv_proj", (width, "d"), ("b", "s", width), bias=c.qkv_bias)
            return ops.split(qkv, shapes, "q, k, v")
        query = self.axis("d" if c.square else "h·d_h")
        widths = (query, *(query if not c.grouped else self.axis("h_kv·d_h"),) * 2)
        return tuple(
            self.split.column(x, f"attention.{name}_proj", (width, "d"), shape, bias=c.qkv_bias)
            for name, width, shape in zip("qkv", widths, shapes, strict=True)
        )

    def by_head(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views head by head. Gradients that products of heads make, or that lose their padding, are copied back.

        Not so that of k where its product makes it as wide as q's: it lies head by head within each token's stride.
        """
        c, ops = self.c, self.ops
        if c.attention != "eager" and not c.pads_heads:
            return q, k, v
        v, q = ops.seen(v, "v"), ops.seen(q, "q")
        return q, ops.seen(k, "k") if c.grouped or c.pads_heads else k, v

    def head_norm(self, heads: Tensor, module: str, width: str, out: Shape) -> Tensor:
        """A norm of query or key heads, `width` wide together."""
        c = self.c
        if c.qk_norm_width == "all-heads":
            return norm(self.ops, c, heads, module, width, weight=c.qk_norm_weight, out=out)
        if c.qk_norm_width == "head":
            return norm(self.ops, c, heads, module, "d_h", weight=c.qk_norm_weight)
        if not c.qk_norm_weight or not c.norm_weight:
            return norm(self.ops, c, heads, module, "d_h", weight=False)
        normed = norm(self.ops, c, heads, module, "d_h", weight=False, out=("b", "s", width))
        return self.ops.times_weight(normed, module, width, out)

    def rotated(self, x: Tensor, name: str) -> Tensor:
        """x * cos + (-second half, first half) * sin, the tables shared by all layers."""
        ops = self.ops
        half = (*x.shape[:-1], "d_h/2")
        first, second = ops.split(x, (half, half), f"{name} halves")
        table = Tensor(-1, ("s", "d_h"), self.c.compute)
        straight = ops.scale(x, f"{name} * cos")
        self.tape.also_saves(table)
        turned = ops.concatenate((ops.scale(second, f"-{name} half"), first), x.shape, f"turned {name}")
        by_sines = ops.scale(turned, f"turned {name} * sin")
        self.tape.also_saves(table)
        return ops.add(straight, by_sines, f"rotated {name}")

    def eager_core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """softmax(q k^T * scale) v as separate operators."""
        c, ops = self.c, self.ops
        h = self.axis("h")
        heads, keys = ("b", "s", h, "d_h"), ("b", c.keys, h, "d_h")
        scores_shape = ("b", h, "s", c.keys)
        if c.grouped:
            k, v = ops.copy(k, "k for each head", keys), ops.copy(v, "v for each head", keys)
        if c.batched:  # bmm wants heads one after the other
            q = ops.copy(q, "q by head")
            k, v = (k, v) if c.grouped else (ops.copy(k, "k by head"), v)
        scores = ops.matmul(q, k, "scores", scores_shape)
        scores = ops.scale(scores, "scaled scores")
        if c.position == "alibi":
            scores = ops.shift(scores, "biased scores")
        scores = ops.scale(scores, "masked scores")
        self.tape.also_saves(Tensor(-1, ("s", c.keys), "bool"))
        if c.implementation == "huggingface" and c.attention_sinks:  # gpt-oss: a column more, in the scores' dtype
            given = scores
            scores = ops.shift(ops.copy(scores, "scores beside sinks"), "scores less their maximum")
            probabilities = ops.softmax(scores, "attention probabilities")
            self.tape.still_named(given)
            self.weights = (probabilities,)
        elif c.implementation == "huggingface":  # softmax(..., dtype=torch.float32).to(query.dtype)
            wide = ops.softmax(ops.cast(scores, "fp32", "scores in fp32"), "attention probabilities in fp32")
            probabilities = ops.cast(wide, q.dtype, "attention probabilities")
            self.weights = (probabilities,)
        else:
            probabilities = ops.softmax(scores, "attention probabilities")
        dropped = ops.dropout(probabilities, "attention probabilities dropout", c.attention_dropout)
        if c.batched and not c.grouped:
            v = ops.copy(v, "v by head")
        attended = ops.matmul(dropped, v, "attention output", heads)
        self.tape.still_named(k, v, scores, probabilities)
        return attended

    def fused_core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One kernel; grouped heads are expanded for the memory-efficient one, which knows none."""
        c, ops = self.c, self.ops
        h, kv = self.axis("h"), self.axis("h_kv")
        if c.cache is not None:
            return cached_attention(ops, c, q, k, v, (h, kv, "d_h"))
        if c.pads_heads:
            return ops.padded_flash_attention(q, k, v, h, kv, "s", splits=not c.attention_dropout)
        if c.attention == "flash":
            return ops.flash_attention(q, k, v, h, kv, "d_h", "s", splits=not c.attention_dropout)
        if c.grouped:
            heads = ("b", "s", h, "d_h")
            k, v = ops.copy(k, "k for each head", heads), ops.copy(v, "v for each head", heads)
        return ops.efficient_attention(q, k, v, h, "d_h", "s")

    def latent_attention(self, x: Tensor) -> Tensor:
        """DeepSeek-V2's latent attention (arXiv 2405.04434), without absorbed matrices, as it is trained."""
        c, ops = self.c, self.ops
        h = self.axis("h")
        tokens = ("b", "s")
        q_width = self.axis("h·(d_n+d_r)")
        if c.query_latent:
            latent = ops.linear(x, "attention.q_a_proj", ("r_q", "d"), (*tokens, "r_q"), bias=c.qkv_bias)
            latent = self.norm(latent, "attention.q_a_norm", "r_q")
            q = self.split.column(latent, "attention.q_b_proj", (q_width, "r_q"), (*tokens, h, "d_n+d_r"), bias=False)
        else:
            q = self.split.column(x, "attention.q_proj", (q_width, "d"), (*tokens, h, "d_n+d_r"), bias=False)
        joint = ops.linear(x, "attention.kv_a_proj", ("r_kv+d_r", "d"), (*tokens, "r_kv+d_r"), bias=c.qkv_bias)
        compressed, key_position = ops.split(joint, ((*tokens, "r_kv"), (*tokens, "d_r")), "latents")
        compressed = self.norm(compressed, "attention.kv_a_norm", "r_kv")
        kv_width = self.axis("h·(d_n+d_v)")
        if c.cache is not None:
            compressed, key_position = cached(ops, c.cache, compressed, key_position)
        read = ("b", c.keys)
        out = (*read, h, "d_n+d_v")
        kv = self.split.column(compressed, "attention.kv_b_proj", (kv_width, "r_kv"), out, bias=False)
        key, value = ops.split(kv, ((*read, h, "d_n"), (*read, h, "d_v")), "keys and values")
        plain, position = ops.split(q, ((*tokens, h, "d_n"), (*tokens, h, "d_r")), "query parts")
        q = ops.concatenate((plain, ops.scale(position, "rotated q")), (*tokens, h, "d_n+d_r"), "q")
        k = ops.concatenate((key, ops.scale(key_position, "rotated k")), (*read, h, "d_n+d_r"), "k")
        if c.attention == "eager":
            scores = ops.scale(ops.matmul(q, k, "scores", ("b", h, "s", c.keys)), "scaled scores")
            probabilities = ops.softmax(ops.scale(scores, "masked scores"), "attention probabilities")
            dropped = ops.dropout(probabilities, "attention probabilities dropout", c.attention_dropout)
            core = ops.copy(ops.matmul(dropped, value, "attention output", (*tokens, h, "d_v")), "output by token")
        elif c.cache is not None:
            core = cached_attention(ops, c, q, k, value, (h, h, "d_n+d_r"), (*tokens, h, "d_v"))
        else:
            core = ops.flash_attention(q, k, value, h, h, "d_n+d_r", "s", out=(*tokens, h, "d_v"))
        if c.selective:
            self.tape.recompute(core, (q, k, value))
        out_width = self.axis("h·d_v")
        return self.split.row(core, "attention.o_proj", ("d", out_width), bias=c.output_bias)

    # -- MLP ---------------------------------------------------------------------------------------------------------

    def mlp(self, x: Tensor) -> Tensor:
        """Dense, or routed experts."""
        x = self.split.module_input(x, "mlp")
        if self.experts:
            return self.routed(x)
        return self.dense(x, "mlp.", "4·d" if self.c.usual_width else "F")

    def dense(self, x: Tensor, prefix: str, width: str) -> Tensor:
        """Up (and gate), activation, down."""
        c, inner = self.c, self.axis(width)
        weight, into = (inner, "d"), ("b", "s", inner)
        gate = None
        if c.gated_mlp and c.implementation == "huggingface":  # down(act(gate(x)) * up(x)), in which nothing has a name
            kind = f"{prefix}{'silu' if c.mlp == 'swiglu' else 'gelu'}"
            if c.fused_gate_up:
                both = ("b", "s", f"2·{inner}")
                gate = up = self.split.column(x, f"{prefix}gate_up_proj", (both[-1], "d"), both, bias=c.mlp_bias)
                gate = Tensor(gate.storage, into, gate.dtype, grad=False)
            else:
                gate = self.split.column(x, f"{prefix}gate_proj", weight, into, bias=c.mlp_bias)
            gate = self.ops.pointwise(gate, kind)
            if not c.fused_gate_up:
                up = self.split.column(x, f"{prefix}up_proj", weight, into, bias=c.mlp_bias)
            product = self.ops.mul(gate, up, f"{kind}(gate) * up")
            self.split.returned(*((up,) if c.fused_gate_up else ()))
            out = self.split.row(product, f"{prefix}down_proj", ("d", inner), bias=c.mlp_bias)
            self.split.returned(x)
            return out
        if c.gated_mlp:
            gate = self.split.column(x, f"{prefix}gate_proj", weight, into, bias=c.mlp_bias)
        up = self.split.column(x, f"{prefix}up_proj", weight, into, bias=c.mlp_bias)
        product = self.activated(up, gate, prefix)
        out = self.split.row(product, f"{prefix}down_proj", ("d", inner), bias=c.mlp_bias)
        self.split.returned(x, *(() if gate is None else (gate,)))
        return out

    def activated(self, up: Tensor, gate: Tensor | None, prefix: str) -> Tensor:
        """gelu(up), relu(up), or silu(gate) * up."""
        ops = self.ops
        if gate is not None:
            kind = "silu" if self.c.mlp == "swiglu" else "gelu"
            return ops.mul(ops.pointwise(gate, f"{prefix}{kind}"), up, f"{prefix}{kind}(gate) * up")
        if self.c.mlp == "relu2":
            squared = ops.pointwise(ops.pointwise(up, f"{prefix}relu", saves="output"), f"{prefix}relu²")
            self.tape.still_named(up)
            return squared
        return ops.pointwise(up, f"{prefix}{self.c.mlp}", saves="output" if self.c.mlp == "relu" else "input")

    def routed(self, x: Tensor) -> Tensor:
        """Top-k experts, every one with an equal share of the token copies (memcalc/step/mlp.py)."""
        c, ops = self.c, self.ops
        if c.implementation == "huggingface":
            return self.with_shared_expert(x, grouped_products(ops, c, x))
        experts = "E/e" if c.expert_split else "E"
        copies, rows = ("b", "s", "k", "d"), (experts, "R")
        inner, bias = f"F_e{c.expert_width_share}", c.expert_bias
        router = ops.linear(x, "mlp.router", ("E", "d"), ("b", "s", "E"), bias=c.router_bias)
        probabilities = ops.softmax(ops.cast(router, "fp32"), "router probabilities")
        weights = ops.gather(probabilities, ("b", "s", "k"), "router weights")
        weights = ops.normalized(weights, "normalized router weights")
        permuted = ops.gather(x, copies, "permuted tokens", padded=(*rows, "d"))
        gate = None
        if c.gated_mlp:
            gate = ops.batched_linear(permuted, "mlp.experts.gate", (experts, "d", inner), (*rows, inner), bias=bias)
        up = ops.batched_linear(permuted, "mlp.experts.up", (experts, "d", inner), (*rows, inner), bias=bias)
        product = self.activated(up, gate, "mlp.experts.")
        done = ops.batched_linear(product, "mlp.experts.down", (experts, inner, "d"), (*rows, "d"), bias=bias)
        permuted_weights = ops.cast(ops.gather(weights, ("b", "s", "k"), "permuted router weights"), done.dtype)
        weighted = ops.mul(done, permuted_weights, "weighted expert outputs", copies)
        summand = ("b", "s" if c.dtensor else self.stream, "d")
        total = self.split.summed(ops.scattered(weighted, summand, "sum of experts"), "sum of experts")
        return self.with_shared_expert(x, total)

    def with_shared_expert(self, x: Tensor, total: Tensor) -> Tensor:
        """The routed experts' output, and beside it that of the expert which every token visits."""
        c, ops = self.c, self.ops
        if not c.shared_expert:
            return total
        common = self.dense(x, "mlp.shared_experts.", "F_s")
        if c.shared_gate:
            gate = ops.linear(x, "mlp.shared_expert_gate", ("1", "d"), ("b", "s", "1"), bias=False)
            common = ops.mul(common, ops.pointwise(gate, "shared gate", saves="output"), "gated shared expert")
        return ops.add(total, common, "sum with shared expert")


def norm(
    ops: Operators, c: Structure, x: Tensor, module: str, width: str, *, weight: bool = True, out: Shape | None = None
) -> Tensor:
    """LayerNorm or RMSNorm, with what parameters the model's norms have."""
    tensors = ("weight",) if weight and c.norm_weight else ()
    if c.normalization == "rmsnorm":
        if c.composite_norms:
            return ops.composite_rms_norm(x, module, width, weight=bool(tensors), out=out)
        return ops.rms_norm(x, module, width, tensors, out)
    return ops.layer_norm(x, module, width, (*tensors, "bias") if tensors and c.norm_bias else tensors, out)


def plain_embedding(c: Structure) -> tuple[Tape, Tensor]:
    """Token and position rows, summed; what all layers share."""
    tape = Tape()
    ops = Operators(tape, c.compute, c.parameters, c.autocast, c.adapters)
    ops.float8 = c.float8
    stream = "s/t" if c.sequence_split else "s"
    width = "d_e" if c.own_embedding_width else "d"
    vocabulary = "V/t" if c.split else "V"
    shared_tables(tape, c)
    if c.dtensor:
        whole = c.whole_table_gradient
        rows = ops.split_rows("embed_tokens", width, ("b", "s"), tied=c.tied, whole_gradient=whole)
        x = Splitting(ops, c).summed(rows, "embed_tokens output")
    else:
        view = c.head_gradient_is_a_view
        x = ops.embedding("embed_tokens", (vocabulary, width), ("b", stream), tied=c.tied, view=view)
    if c.own_embedding_width:
        x = ops.linear(x, "project_in", ("d", "d_e"), ("b", stream, "d"), bias=False)
    if c.position == "learned":
        positions = ops.embedding("embed_positions", (c.position_table, "d"), (stream,), counts=True)
        x = ops.broadcast_add(x, positions, "embedding sum")
    if c.embedding_norm:
        x = norm(ops, c, x, "embed_norm", "d")
    return tape, x


def shared_tables(tape: Tape, c: Structure) -> None:
    """The causal mask and the rotary tables, made once a forward and kept by every layer until backward has passed."""
    write_mask(tape, c)
    citation = "made once in each forward, shared by all layers"
    tables: list[tuple[str, tuple[str, ...], str]] = []
    if c.attention == "eager":
        tables.append(("causal mask", ("s", c.keys), "bool"))
    if c.position == "rope" and not c.mla:
        tables += [("cosines", ("s", "d_h"), c.compute), ("sines", ("s", "d_h"), c.compute)]
    for name, shape, dtype in tables:
        tape.held.add(tape.store(name, shape, dtype, citation, component=Component.TEMPORARIES))


def plain_head(c: Structure) -> tuple[Tape, None]:
    """Final norm, output projection, and the loss on fp32 logits."""
    tape = Tape(kind=Component.LOGITS_AND_LOSS)
    ops = Operators(tape, c.compute, c.parameters, c.autocast, c.adapters)
    ops.float8 = c.float8
    stream = "s/t" if c.sequence_split else "s"
    dtype = c.parameters if c.autocast else c.compute
    x = tape.input("head input", ("b", stream, "d"), dtype, f"{PAPER}.3")
    if c.final_norm:
        given = x
        x = norm(ops, c, x, "norm", "d")
        tape.still_named(given)
    width = "d"
    if c.own_embedding_width:
        width = "d_e"
        x = ops.linear(x, "project_out", ("d_e", "d"), ("b", stream, "d_e"), bias=False)
    if c.cache is not None:
        write_next_token(ops, c, x, width)
    else:
        write_loss(ops, c, x, width)
    return tape, None
