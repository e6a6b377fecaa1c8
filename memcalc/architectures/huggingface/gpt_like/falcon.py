"""Falcon: linear layers with transposed weights, and a mask in every attention."""

from __future__ import annotations

from memcalc.architectures.huggingface.modules.mlp import Mlps
from memcalc.architectures.huggingface.modules.rotary import Rotary
from memcalc.architectures.kv_cache import cached, cached_attention
from memcalc.architectures.structure import BlockStructure
from memcalc.ledger.component import Component
from memcalc.programs import operator_workspaces
from memcalc.programs.program import SharedTable
from memcalc.programs.tape import Node, Shape, Tensor
from memcalc.spec.recipes import DTYPE_BYTES

HEADS = ("b", "s", "h", "d_h")
MAP = ("b", "h", "s", "s")


class Falcon(Rotary, Mlps):
    """FalconDecoderLayer."""

    names_returned = True

    @classmethod
    def lacks_kernel(cls, c: BlockStructure) -> str:
        """Return why PyTorch does not run a kernel: flash takes no mask, and Falcon does not set enable_gqa."""
        if c.cache is not None:
            return ""
        if c.attention.kernel in ("flash", "math"):
            return "because its layers always have a mask"
        shares = c.attention.single_key_head and not (c.residual.parallel and c.residual.norms == 2)
        return "because it has one key head for all queries" if shares and c.attention.kernel != "eager" else ""

    @property
    def new_architecture(self) -> bool:
        """Falcon-40B's decoder: grouped heads, or two parallel norms."""
        c = self.c
        return (c.residual.parallel and c.residual.norms == 2) or (
            c.attention.grouped and not c.attention.single_key_head
        )

    @property
    def alibi(self) -> bool:
        """Whether positions are a bias added to scores (Falcon-RW)."""
        return self.c.position.kind == "alibi"

    @property
    def mask(self) -> Shape:
        """Axes of the mask; with ALiBi one per head."""
        return ("b", "h", "s", "s") if self.alibi else super().mask

    @property
    def reads_tables(self) -> bool:
        """Whether layers read RoPE tables; with ALiBi they are created but not read."""
        return not self.alibi

    def shared_tables(self) -> None:
        """Write the shared tables, a mask for fused kernels and, with ALiBi, its biases and the padding mask."""
        super().shared_tables()
        c = self.c
        if self.alibi:
            self.tape.live.names.add(self.shared_table("tokens that count", ("b", "s"), "int64").storage)
            alibi = self.shared_table("alibi", ("b", "h", "s"), c.dtypes.embedded)
            self.name_argument(alibi.storage, stays=c.saving.checkpoints_layers)
        if c.attention.kernel == "eager" or c.cache is not None:
            return
        if self.alibi:
            self.mask_with_alibi()
        else:
            self.name_mask(self.shared_table("causal mask", ("s", "s"), "bool").storage, "all")

    def masks(self) -> None:
        """Write the masks; in generation the fused kernels' mask, too."""
        super().masks()
        if self.c.cache is not None and self.c.attention.kernel != "eager":
            self.name_mask(self.causal_truth("mask").storage, "all")

    def mask_with_alibi(self) -> None:
        """Write the mask with ALiBi, saved unless the kernel copies it to another dtype or longer rows."""
        c, tape = self.c, self.tape
        sizes = {"length": "s", "item_bytes": DTYPE_BYTES[c.dtypes.embedded], "heads": "h"}
        for name, rule, kept in (
            ("mask with alibi", operator_workspaces.mask_of_rows_in_eights, not c.dtypes.autocast),
            ("mask with alibi before padding", operator_workspaces.mask_before_padding, False),
        ):
            filled = operator_workspaces.named(rule, **sizes)
            storage = tape.store(
                name, (), "uint8", self.citation, rule=filled, component=Component.TEMPORARIES, table=SharedTable(name)
            )
            tape.record(Node(name, (), (Tensor(storage, self.mask, c.dtypes.embedded, grad=False),), (), ()))
            self.name_argument(storage, stays=kept or c.saving.checkpoints_layers)

    def layer(self) -> Tensor:
        """Attention and MLP in parallel, with one norm or two; or sequentially."""
        c, ops = self.c, self.ops
        x = residual = self.entry()
        normed = given = self.norm(x, "input_norm", "d")
        if c.residual.parallel and c.residual.norms == 2:
            given = self.norm(x, "post_attention_norm", "d")
        attended = self.attention(normed)
        if not c.residual.parallel:
            dropped = ops.dropout(attended, "attention dropout", c.attention.dropout)
            residual = ops.add(x, dropped, "attention sum")
            self.tape.still_referenced(dropped)
            given = self.norm(residual, "post_attention_norm", "d")
        total = made = self.mlp(given)
        if c.residual.parallel:
            total = ops.add_in_place(made, attended, "mlp output + attention output")
        output = ops.add(residual, ops.dropout(total, "mlp dropout", c.residual.dropout), "layer output")
        self.tape.still_referenced(normed, given, attended, made)
        return output

    def mlp(self, x: Tensor) -> Tensor:
        """FalconMLP."""
        inner, bias = self.c.mlp.width, self.c.mlp.bias
        up = self.linear(x, "mlp.up_proj", (inner, "d"), ("b", "s", inner), bias=bias)
        return self.linear(self.act(up, "mlp."), "mlp.down_proj", ("d", inner), ("b", "s", "d"), bias=bias)

    def linear(self, x: Tensor, module: str, weight: Shape, out: Shape, *, bias: bool) -> Tensor:
        """FalconLinear: x @ weight.T + bias.

        Autocast caches only casts of leaves; a transposed weight is no leaf. The bias is not cast.
        """
        region = set(self.tape.live.region)
        y = self.ops.linear(x, module, weight, out, bias=bias, apart=True)
        if self.c.linears.adapters is None:  # adapters' weights are leaves
            self.tape.live.region = region
        return y

    def attention(self, x: Tensor) -> Tensor:
        """FalconAttention.forward; a variable references the fused qkv until it returns."""
        c = self.c
        width = "(h+2·h_kv)·d_h" if c.attention.grouped else "3·d"
        qkv = self.linear(x, "attention.qkv_proj", (width, "d"), ("b", "s", width), bias=c.projections.bias)
        q, k, v = self.heads(qkv)
        if not self.alibi:
            given = (q, k)
            q, k = self.positioned(q, k)
            self.tape.still_referenced(*given)
        if c.cache is not None:
            given = (k, v)
            k, v = cached(self.ops, c.cache, k, v)
            self.tape.still_referenced(*given)
        by_token, *names = (
            self.by_products(q, k, v, x.dtype) if c.attention.kernel == "eager" else (self.in_one_kernel(q, k, v),)
        )
        y = self.linear(by_token, "attention.o_proj", ("d", "d"), ("b", "s", "d"), bias=c.projections.output_bias)
        self.tape.still_referenced(x, qkv, by_token, q, k, v, *names)
        return y

    def in_one_kernel(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """scaled_dot_product_attention with a boolean mask, or with an additive mask that includes ALiBi."""
        if self.c.cache is not None:
            return cached_attention(self.ops, self.c, q, k, v, ("h", "h_kv", "d_h"))
        if not self.alibi:
            return self.ops.efficient_attention(q, k, v, "h", "d_h", "s", masked=True)
        mask = Tensor(-1, MAP, self.c.dtypes.embedded, grad=False)
        return self.ops.efficient_attention(q, k, v, "h", "d_h", "s", added=mask)

    def by_products(self, q: Tensor, k: Tensor, v: Tensor, dtype: str) -> tuple[Tensor, ...]:
        """Return attention as separate operators, by token, and the tensors that variables reference."""
        c, ops = self.c, self.ops
        heads = ("b", c.keys, *HEADS[2:]) if c.attention.single_key_head and not self.new_architecture else ()
        copies = ("q by head" if self.copies_queries else "", "k by head" if self.copies_keys or heads else "")
        scores = ops.matmul(q, k, "scores", (*MAP[:-1], c.keys), copies if c.batched else ("", ""), expands=heads)
        probabilities, *names = self.with_alibi(scores, dtype) if self.alibi else self.without(scores)
        self.weights = (probabilities,)
        copies = ("", "v by head" if self.copies_keys or (heads and c.batched) else "")
        core = ops.matmul(probabilities, v, "attention output", HEADS, copies, expands=heads)
        return self.by_token(core), *names

    def without(self, scores: Tensor) -> tuple[Tensor, ...]:
        """Return the attention probabilities, without dropout."""
        ops = self.ops
        scaled = ops.divide_by_number(scores, "scaled scores")
        probabilities = ops.softmax(
            ops.shift(scaled, "masked scores", self.c.dtypes.embedded), "attention probabilities"
        )
        self.tape.still_referenced(scaled)
        return (probabilities,)

    def with_alibi(self, scores: Tensor, dtype: str) -> tuple[Tensor, ...]:
        """Return dropped-out probabilities; ALiBi is added to fp32 scores, and again as part of the mask."""
        c, ops = self.c, self.ops
        wide = ops.cast(scores, "fp32", "scores in fp32")
        logits = ops.divide_by_number(ops.shift(wide, "scores + alibi", c.dtypes.embedded), "scaled scores")
        masked = ops.shift(logits, "masked scores", c.dtypes.embedded)
        probabilities = ops.softmax(masked, "attention probabilities", dtype)
        self.tape.still_referenced(masked)
        dropped = ops.dropout(probabilities, "attention probabilities dropout", c.attention.dropout)
        return dropped, scores, wide, logits

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """_split_heads: keys and values of fewer heads are indexed, which copies them."""
        c, ops = self.c, self.ops
        if not c.attention.grouped and not self.new_architecture:
            q, k, v = ops.slices(qkv, (HEADS, HEADS, HEADS), "q, k, v")
            return q, k, v
        shared = ("b", "s", "h_kv", "d_h")
        (q,) = ops.slices(qkv, (HEADS,), "q")
        k, v = (ops.one_row(qkv, shared, f"{name} of each group") for name in ("k", "v"))
        if c.attention.single_key_head and self.new_architecture:
            return q, ops.expanded(k, "k for each head", HEADS), ops.expanded(v, "v for each head", HEADS)
        if not self.new_architecture:
            return q, k, v
        all_q, all_k, all_v = (ops.copy(x, f"{name} of each head", HEADS) for x, name in ((q, "q"), (k, "k"), (v, "v")))
        self.tape.still_referenced(k, v)
        return all_q, all_k, all_v
