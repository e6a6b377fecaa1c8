"""Megatron-Core's decoder of Transformer Engine modules, operator by operator.

Sources: Megatron-LM core_r0.14 core/models/gpt/gpt_layer_specs.py (get_gpt_layer_with_transformer_engine_spec),
core/transformer/{transformer_layer,attention,mlp}.py; Transformer Engine 2.11. A LLaMA layer sums to
s·b·d/t·(12 + 4·h_kv/h + 6·F/d) bytes, and 4·b·h·s/t of log-sum-exps.
"""

from __future__ import annotations

from memcalc.architectures.megatron_mla import latent_attention
from memcalc.architectures.megatron_moe import MegatronMoe
from memcalc.architectures.structure import BlockStructure
from memcalc.ledger.component import Component
from memcalc.operators import Operators
from memcalc.operators.base import NN_LINEAR, LinearLayers
from memcalc.programs.tape import Shape, Tape, Tensor

SOURCE = "Megatron-LM core_r0.14 core/transformer/transformer_layer.py"
SCORES = "matmul_input_buffer"  # an input of query-key matmuls that is never read (DotProductAttention)


def write(c: BlockStructure, part: str) -> tuple[Tape, Tensor | None]:
    """Return the tape of one part of the model, and its output."""
    if part == "embedding":
        return _embedding(c)
    if part == "head":
        return _head(c)
    layer = MegatronLayer if c.attention.kernel == "flash" else LocalLayer
    return layer(c, experts=part == "expert layer").layer()


def _operators(c: BlockStructure, tape: Tape, linears: LinearLayers = NN_LINEAR) -> Operators:
    """Return operators on a tape. Without Transformer Engine, autograd hooks accumulate weight gradients."""
    ops = Operators(tape, c.dtypes, linears)
    ops.fuses_weight_gradients = c.attention.kernel == "flash"
    return ops


def norm(ops: Operators, c: BlockStructure, x: Tensor, module: str, width: str = "d") -> Tensor:
    """The model's norm, in one kernel: of Transformer Engine, or PyTorch's."""
    tensors: tuple[str, ...] = ("weight",) if c.norm.weight else ()
    layer_norm = c.norm.kind == "layernorm"
    tensors = (*tensors, "bias") if layer_norm and tensors and c.norm.bias else tensors
    if c.attention.kernel != "flash":
        return (ops.layer_norm if layer_norm else ops.rms_norm)(x, module, width, tensors)
    return ops.te_norm(x, module, width, tensors, mean=layer_norm)


class MegatronLayer:
    """Writer of one TransformerLayer's tape.

    Args:
        structure: the options of the modules.
        experts: whether this layer's MLP is a mixture of experts.
    """

    def __init__(self, structure: BlockStructure, *, experts: bool) -> None:
        self.c = structure
        self.experts = experts
        self.tape = Tape()
        self.ops = _operators(structure, self.tape, structure.linears)
        self.stream = structure.sharding.tokens
        self.axis = structure.sharding.axis

    def layer(self) -> tuple[Tape, Tensor]:
        """Return the tape of a layer, and its output."""
        c, ops = self.c, self.ops
        x = self.tape.input("layer input", ("b", self.stream, "d"), c.dtypes.compute, SOURCE)
        attended = self.attention(norm(ops, c, x, "input_norm"))
        attended = ops.dropout(attended, "attention dropout", c.residual.dropout)
        x = ops.add(x, attended, "attention sum")
        normed = norm(ops, c, x, "post_attention_norm")
        fed = self.mlp(normed)
        if "mlp" in c.saving.recomputed_modules and not self.experts:
            self.tape.recompute(fed, (normed,))
        fed = ops.dropout(fed, "mlp dropout", c.residual.dropout)
        return self.tape, ops.add(x, fed, "layer output")

    def attention(self, x: Tensor) -> Tensor:
        """SelfAttention: one linear layer for q, k and v with interleaved heads, so q and v are copied."""
        c, ops = self.c, self.ops
        core = latent_attention(self, x) if c.projections.mla else self.grouped_attention(x)
        if c.sharding.all_to_all:
            core = ops.exchanged(core, "attention output of the rank's tokens")
        return ops.row_parallel(core, "attention.o_proj", ("b", self.stream, "d"), bias=c.projections.output_bias)

    def grouped_attention(self, x: Tensor) -> Tensor:
        """Attention with grouped (or all) heads, before the output projection."""
        c, ops = self.c, self.ops
        h, kv = self.axis("h"), self.axis("h_kv")
        width = self.axis(c.attention.qkv_width)
        qkv = ops.column_parallel(x, "attention.qkv_proj", width, ("b", "s", width), bias=c.projections.bias)
        heads: tuple[Shape, ...] = (("b", "s", h, "d_h"), ("b", "s", kv, "d_h"), ("b", "s", kv, "d_h"))
        q, k, v = ops.split(qkv, heads, "q, k, v")
        q = ops.copy(q, "q")
        if c.projections.qk_norm:
            q, k = norm(ops, c, q, "attention.q_norm", "d_h"), norm(ops, c, k, "attention.k_norm", "d_h")
        if c.position.kind == "rope":
            q, k = ops.scale(q, "rotated q"), ops.scale(k, "rotated k")
        else:
            k = ops.copy(k, "k")
        v = ops.copy(v, "v")  # Transformer Engine's get_qkv_layout copies tensors of any layout it does not know
        return self.core(q, k, v, h, kv, "d_h")

    def core(
        self, q: Tensor, k: Tensor, v: Tensor, heads: str, kv_heads: str, width: str, out: Shape | None = None
    ) -> Tensor:
        """TEDotProductAttention; with context parallelism perhaps after an all-to-all from tokens to heads."""
        c, ops = self.c, self.ops
        if c.sharding.all_to_all:
            q, k, v = (ops.exchanged(t, f"{name} of the rank's heads") for t, name in ((q, "q"), (k, "k"), (v, "v")))
        core = ops.flash_attention(q, k, v, heads, kv_heads, width, "s", out=out)
        if "core_attn" in c.saving.recomputed_modules:
            self.tape.recompute(core, (q, k, v))
        return core

    def mlp(self, x: Tensor) -> Tensor:
        """The MLP: dense, or routed experts."""
        if self.experts:
            return MegatronMoe(self).routed(x)
        return self.dense(x, "mlp.", self.c.mlp.width)

    def dense(self, x: Tensor, prefix: str, width: str) -> Tensor:
        """linear_fc1 (gate and up in one), activation, linear_fc2."""
        c, ops = self.c, self.ops
        inner = self.axis(width)
        both = self.axis(f"2·{width}") if c.mlp.gated else inner
        name = f"{prefix}gate_up_proj" if c.mlp.gated else f"{prefix}up_proj"
        up = ops.column_parallel(x, name, both, ("b", "s", both), bias=c.mlp.bias)
        if c.mlp.gated:
            product = ops.fused_glu(up, f"{prefix}activation", ("b", "s", inner))
        else:
            product = ops.pointwise(up, f"{prefix}{c.mlp.activation}", saves="input")
        return ops.row_parallel(product, f"{prefix}down_proj", ("b", self.stream, "d"), bias=c.mlp.bias)


class LocalLayer(MegatronLayer):
    """Writer of one TransformerLayer of Megatron-Core's own modules, with attention as separate operators.

    Megatron-LM core_v0.16.1 core/transformer/dot_product_attention.py, core/fusions/fused_softmax.py. A layer saves the
    5·b·h·s² bytes of scores that Korthikanti et al. (arXiv 2205.05198), section 4.1, publish, and the causal mask.
    """

    qkv: tuple[Tensor, ...] = ()  # variables of attention's forward

    def layer(self) -> tuple[Tape, Tensor]:
        """Return the tape of a layer, and its output. Checkpoints are of core/tensor_parallel/random.py."""
        c, ops = self.c, self.ops
        self.tape.checkpoints.stops_early, self.tape.checkpoints.reentrant = False, True
        x = self.tape.input("layer input", ("b", self.stream, "d"), c.dtypes.compute, SOURCE)
        normed = norm(ops, c, x, "input_norm")
        x = self.added(self.attention(normed), x, "attention", "attention.o_proj", bias=c.projections.output_bias)
        masks = self.tape.nodes[-1].saved
        self.tape.still_referenced(normed)
        normed = norm(ops, c, x, "post_attention_norm")
        fed = self.mlp(normed)
        if "mlp" in c.saving.recomputed_modules and not self.experts:
            self.tape.recompute(fed, (normed,))
        fed = self.added(fed, x, "mlp", "mlp.down_proj", bias=c.mlp.bias and not self.experts)
        masks += self.tape.nodes[-1].saved
        self.tape.still_referenced(normed, *map(self.tape.full_tensor, masks))
        return self.tape, fed

    def added(self, x: Tensor, residual: Tensor, name: str, module: str, *, bias: bool) -> Tensor:
        """The residual stream plus a module's output with its bias and dropout."""
        return self.ops.bias_dropout_add(x, residual, f"{name} sum", self.c.residual.dropout, module, bias=bias)

    def attention(self, x: Tensor) -> Tensor:
        """SelfAttention without the bias of its output projection."""
        core = latent_attention(self, x) if self.c.projections.mla else self.grouped_attention(x)
        projected = self.ops.summed_output(core, "attention.o_proj", ("b", self.stream, "d"))
        self.tape.still_referenced(core, *self.qkv)
        return projected

    def grouped_attention(self, x: Tensor) -> Tensor:
        """SelfAttention: q, k and v are views of one linear layer's output; RoPE copies q and k."""
        c, ops = self.c, self.ops
        h, kv = self.axis("h"), self.axis("h_kv")
        width = self.axis(c.attention.qkv_width)
        qkv = ops.projected(x, "attention.qkv_proj", width, ("b", "s", width), bias=c.projections.bias)
        heads: tuple[Shape, ...] = (("b", "s", h, "d_h"), ("b", "s", kv, "d_h"), ("b", "s", kv, "d_h"))
        q, k, v = ops.split(qkv, heads, "q, k, v")
        if c.projections.qk_norm:
            q, k = norm(ops, c, q, "attention.q_norm", "d_h"), norm(ops, c, k, "attention.k_norm", "d_h")
        elif c.attention.grouped:
            q = ops.copy(q, "q")  # query.reshape: query heads alternate with those of keys and values
        self.qkv = (q, k, v)
        if c.position.kind == "rope":
            q, k = self.rotated(q, "q"), self.rotated(k, "k")
            self.qkv += (q, k)
        return self.attended(q, k, v)

    def rotated(self, x: Tensor, name: str) -> Tensor:
        """rope_utils.py, _apply_rotary_pos_emb_bshd: each call computes cosines and sines, which autograd saves."""
        ops = self.ops
        t = ops.viewed(x, x.shape, f"{name} to rotate")
        (rest,) = ops.slices(x, (x.shape,), f"{name} not to rotate,")  # empty, but its gradient is as large as x
        tables = [self.angles(each, name) for each in ("cosines", "sines")]
        straight = ops.mul(t, tables[0], f"{name} * cos")
        half = (*x.shape[:-1], "d_h/2")
        first, second = ops.split(t, (half, half), f"{name} halves")
        turned = ops.concatenate((ops.scale(second, f"-{name} half"), first), x.shape, f"turned {name}")
        rotated = ops.add(straight, ops.mul(turned, tables[1], f"turned {name} * sin"), f"sum of {name}")
        whole = ops.concatenate((rotated, rest), x.shape, f"rotated {name}")
        self.tape.still_referenced(rotated, *tables)
        return whole

    def angles(self, each: str, name: str) -> Tensor:
        """Cosines or sines of the angles in fp32, scaled, and in the dtype of the activations."""
        ops, shape = self.ops, ("s", "d_h")
        computed = ops.table(f"{each} of {name} in fp32", shape, "fp32")
        scaled = ops.table(f"scaled {each} of {name}", shape, "fp32", of=(computed,))
        return (
            scaled
            if self.c.dtypes.compute == "fp32"
            else ops.table(f"{each} of {name}", shape, self.c.dtypes.compute, of=(scaled,))
        )

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """DotProductAttention: saves softmax(scores) and its dropout; the scores are live until it returns."""
        c, ops = self.c, self.ops
        heads, entered = self.axis("h"), (q, k, v)
        if c.attention.grouped:
            each = ("b", "s", heads, "d_h")
            k, v = ops.copy(k, "k for each head", each), ops.copy(v, "v for each head", each)
        q, by_head = self.leaf(q, "q"), k if c.attention.grouped else self.leaf(k, "k")
        scores = ops.biased_matmul(Tensor(-1, ("1",), c.dtypes.compute), q, by_head, "scores", ("b", heads, "s", "s"))
        self.tape.nodes[-1].buffer = SCORES
        mask = self.causal_mask()
        probabilities = ops.softmax(ops.masked_view(scores, mask, "masked scores"), "attention probabilities")
        self.tape.still_referenced(mask)
        dropped = ops.dropout(probabilities, "attention probabilities dropout", c.attention.dropout)
        v = (
            v if c.attention.grouped else self.leaf(v, "v")
        )  # the gradients of repeated heads are sums in the leaf's strides
        context = ops.matmul(dropped, v, "attention output by head", q.shape)
        core = ops.copy(context, "attention output")
        self.tape.still_referenced(*entered, k, v, scores, dropped)
        if "core_attn" in c.saving.recomputed_modules:
            self.tape.recompute(core, entered)
        return core

    def causal_mask(self) -> Tensor:
        """The upper triangle of ones as bool, computed in fp32 (core/transformer/utils.py, get_default_causal_mask)."""
        ops, shape = self.ops, ("s", "s")
        ones = ops.table("ones of the causal mask", shape, "fp32")
        return ops.table("causal mask", shape, "bool", of=(ops.table("upper triangle", shape, "fp32", of=(ones,)),))

    def leaf(self, x: Tensor, name: str) -> Tensor:
        """An input of recomputed attention: a leaf, with a gradient that autograd copies into the leaf's strides.

        torch 2.13 torch/csrc/autograd/functions/accumulate_grad.h, accumulateGrad: matmuls by head produce it.
        """
        return self.ops.restrided_view(x, name) if "core_attn" in self.c.saving.recomputed_modules else x

    def dense(self, x: Tensor, prefix: str, width: str) -> Tensor:
        """linear_fc1 (gate and up in one), its bias with the activation, linear_fc2 without its bias."""
        c, ops = self.c, self.ops
        inner = self.axis(width)
        both = self.axis(f"2·{width}") if c.mlp.gated else inner
        name = f"{prefix}gate_up_proj" if c.mlp.gated else f"{prefix}up_proj"
        up = ops.projected(x, name, both, ("b", "s", both), bias=False)
        active = ops.biased_activation(up, f"{prefix}activation", ("b", "s", inner), name, bias=c.mlp.bias)
        return ops.summed_output(active, f"{prefix}down_proj", ("b", self.stream, "d"))


def _embedding(c: BlockStructure) -> tuple[Tape, Tensor]:
    """LanguageModelEmbedding: rows of the rank's part of the vocabulary, summed across ranks.

    Several sequences are copied, so that the sequence's axis is the first; their gradients are copied back. The two
    embeddings are live until the module returns (core/models/common/embeddings/language_model_embedding.py).
    """
    tape = Tape()
    ops = _operators(c, tape)
    copies = c.batched and not c.sharding.sequence_parallel
    vocabulary = c.sharding.axis("V")
    words = ops.embedding(
        "embed_tokens",
        (vocabulary, "d"),
        ("b", "s"),
        tied=c.embedding.tied,
        view=ops.fuses_weight_gradients,
        copies_gradient=copies,
    )
    if c.sharding.tensor_parallel and not c.sharding.sequence_parallel:
        words = ops.zeroed_rows(words, "embedding of the rank's rows")
    x, given = words, [words]
    if c.position.kind == "learned":
        positions = ops.embedding("embed_positions", (c.position.table, "d"), ("b", "s"), copies_gradient=copies)
        given.append(positions)
        x = ops.add(x, positions, "embedding sum")
    if c.sharding.sequence_parallel:
        x = ops.scattered_sequence(x, "embedding of the rank's tokens", ("b", "s/t", "d"))
    elif copies:
        x = ops.copy(x, "embedding, sequence first")
    x = ops.dropout(x, "embedding dropout", c.residual.dropout)
    tape.still_referenced(*given)
    return tape, x


def _head(c: BlockStructure) -> tuple[Tape, None]:
    """The final norm, the output layer, and the vocabulary-parallel loss."""
    tape = Tape(saved_component=Component.LOGITS_AND_LOSS)
    ops = _operators(c, tape)
    x = tape.input("head input", ("b", c.sharding.tokens, "d"), c.dtypes.compute, SOURCE)
    if c.head.norm:
        x = norm(ops, c, x, "norm")
    vocabulary = c.sharding.axis("V")
    tape.begin_head()
    out = ("b", "s", vocabulary)
    logits = ops.column_parallel(x, "lm_head", vocabulary, out, bias=c.head.bias, shared=True, tied=c.embedding.tied)
    tape.end_forward()
    loss = ops.cross_entropy_in_place(logits) if c.loss.kind == "fused" else ops.vocab_parallel_cross_entropy(logits)
    tape.hold(loss)
    return tape, None
