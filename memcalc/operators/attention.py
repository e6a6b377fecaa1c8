"""Fused attention kernels: flash and memory-efficient."""

from __future__ import annotations

from memcalc.ledger.component import Component
from memcalc.operators.base import Base
from memcalc.programs import operator_workspaces
from memcalc.programs.tape import NEW, OF_THE_HOST, BackwardMemory, ForwardMemory, Node, Shape, Tensor
from memcalc.spec.recipes import DTYPE_BYTES

# ATen native/transformers/cuda/attention.cu, _efficient_attention_forward: CPU scalars, saved with the rest
SEED_AND_OFFSET = (Tensor(OF_THE_HOST, ("1",), "int64"), Tensor(OF_THE_HOST, ("1",), "int64"))
PADDED_WIDTH = "⌈d_h⌉₈"


class FusedAttention(Base):
    """Fused attention kernels: flash and memory-efficient."""

    def flash_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: str,
        kv_heads: str,
        head_dim: str,
        length: str | tuple[str, str],
        *,
        splits: bool = False,
        out: Shape | None = None,
    ) -> Tensor:
        """Flash attention; saves q, k, v, its output, and fp32 log-sum-exps (flash_attn/flash_api.cpp).

        Args:
            q: queries.
            k: keys.
            v: values.
            heads: axis of the query heads.
            kv_heads: axis of the key/value heads.
            head_dim: axis of the head dimension.
            length: axis of the tokens; (queries, keys) where they differ.
            splits: whether forward may split the keys across thread blocks; never with dropout.
            out: axes of the output, where they differ from those of q.
        """
        citation = "ATen native/transformers/cuda/flash_attn/flash_api.cpp"
        v, k, q = (self.autocast_input(t, "attention") for t in (v, k, q))  # as in `linear`
        name = "attention"
        length, keys = (length, None) if isinstance(length, str) else length
        y = self.tape.new(f"{name} output", out or q.shape, q.dtype, citation)
        lse = self.tape.store(f"{name} log-sum-exp", ("b", heads, length), "fp32", citation)
        sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "length": length}
        item_bytes = DTYPE_BYTES[q.dtype]
        rule = operator_workspaces.named(operator_workspaces.flash_backward, **sizes, item_bytes=item_bytes)
        scratch = self.tape.store(f"{name} backward accumulators", (), "uint8", citation, rule=rule)
        parts: tuple[int, ...] = ()
        if splits:
            rule = operator_workspaces.named(
                operator_workspaces.flash_forward, **sizes, item_bytes=item_bytes, keys=keys
            )
            parts = (self.tape.store(f"{name} splits", (), "uint8", citation, rule=rule),)
        # 24 bytes beyond the published activation formulas: a random seed with its offset, and an unused mask.
        state, mask = (
            self.tape.store(f"{name} {what}", (count,), "int64", citation, component=Component.TEMPORARIES)
            for what, count in (("random state", "2"), ("unused mask", "1"))
        )
        kept = (lse, state, mask)
        node = Node(
            name,
            (q, k, v),
            (y,),
            (*dict.fromkeys(t.storage for t in (q, k, v, y)), *kept),
            (NEW, NEW, NEW),
            forward=ForwardMemory(also=kept, temporaries=parts),
            backward=BackwardMemory(temporaries=(scratch, *self._dropped(q, k, v))),
            variables=(*_by_head(q, k, v, y), *(self.tape.full_tensor(index) for index in kept)),
        )
        self.tape.record(node)
        return y

    def flex_attention(self, q: Tensor, k: Tensor, v: Tensor, heads: str, out: Shape) -> Tensor:
        """Compiled flex_attention; saves q, k, v, its output, and fp32 log-sum-exps.

        Backward first sums the products of the output and its gradient.

        Args:
            q: queries.
            k: keys.
            v: values.
            heads: axis of the heads.
            out: axes of the output.
        """
        tape, citation = self.tape, "torch 2.13 torch/_higher_order_ops/flex_attention.py, FlexAttentionAutogradOp"
        y = tape.new("attention output", out, q.dtype, citation)
        lse, delta = (
            tape.store(f"attention {name}", ("b", heads, "s"), "fp32", citation)
            for name in ("log-sum-exp", "sum of gradient times output")
        )
        saved = tuple(dict.fromkeys(t.storage for t in (q, k, v, y)))
        node = Node(
            "attention",
            (q, k, v),
            (y,),
            (*saved, lse),
            (NEW, NEW, NEW),
            forward=ForwardMemory(also=(lse,)),
            backward=BackwardMemory(prepares=((delta, 1),), between=((delta, -1),)),
            variables=(*_by_head(q, k, v, y), tape.full_tensor(lse)),
        )
        tape.record(node)
        return y

    def padded_flash_attention(
        self, q: Tensor, k: Tensor, v: Tensor, heads: str, kv_heads: str, length: str, *, splits: bool
    ) -> Tensor:
        """Flash attention for a head_dim that is no multiple of 8: on padded copies; the output is a view.

        ATen native/transformers/attention.cpp: pad_last_dim<8> and its callers. Padding makes tensors with heads before
        tokens, and the output has their strides. So backward copies the output and its gradient
        (cuda/attention_backward.cu, contiguous_out).
        """
        v, k, q = (self.autocast_input(t, "attention") for t in (v, k, q))  # as in `linear`
        wide_q, wide_k, wide_v = (self.pad_heads(t, name) for t, name in ((q, "q"), (k, "k"), (v, "v")))
        y = self.flash_attention(wide_q, wide_k, wide_v, heads, kv_heads, PADDED_WIDTH, length, splits=splits)
        names = ("gradient of attention output, tokens first", "attention output, tokens first")
        copies = [self.tape.store(name, y.shape, y.dtype, "ATen attention_backward.cu") for name in names]
        node = self.tape.nodes[-1]
        node.backward = node.backward._replace(prepares=tuple((index, 1) for index in copies))
        self.tape.still_referenced(q, k, v)  # arguments of aten::scaled_dot_product_attention, perhaps cast by autocast
        seen = Tensor(y.storage, (*y.shape[:-1], "d_h"), y.dtype)
        self.tape.record(Node("attention output without padding", (y,), (seen,), (), (NEW,)))
        return seen

    def pad_heads(self, x: Tensor, name: str) -> Tensor:
        """Return a copy with the head_dim padded to a multiple of 8."""
        y = self.tape.new(f"{name} padded", (*x.shape[:-1], PADDED_WIDTH), x.dtype, "aten::constant_pad_nd")
        self.tape.record(Node(f"{name} padded", (x,), (y,), (), (NEW,)))
        return y

    def _dropped(self, *inputs: Tensor) -> tuple[int, ...]:
        """Gradients that no tensor needs, but that the kernel computes for q, k and v."""
        found = (tensor for tensor in inputs if not tensor.grad)
        return tuple(self.tape.store("unneeded gradient", t.shape, t.dtype, "ATen, mha_bwd") for t in found)

    def efficient_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: str,
        head_dim: str,
        length: str,
        *,
        masked: bool = False,
        added: Tensor | None = None,
        out: Shape | None = None,
    ) -> Tensor:
        """Memory-efficient attention; saves q, k, v, its output, and fp32 log-sum-exps.

        ATen native/transformers/cuda/attention.cu.

        Args:
            q: queries.
            k: keys.
            v: values.
            heads: axis of the heads.
            head_dim: axis of the head dimension.
            length: axis of the tokens.
            masked: whether the kernel gets a boolean mask; then it saves a mask in its dtype.
            added: an additive mask per head, which the kernel saves.
            out: axes of the output, where values and keys differ in head_dim.
        """
        citation = "ATen native/transformers/cuda/attention.cu, attention_backward.cu"
        mask: tuple[Tensor, ...] = () if added is None else (self.added_mask(added, length, heads),)
        v, k, q = (self.autocast_input(t, "attention") for t in (v, k, q))  # as in `linear`
        mask = (self.mask_in_dtype(q.dtype, length),) if masked else mask
        name = "attention"
        y = self.tape.new(f"{name} output", out or q.shape, q.dtype, citation)
        rows = operator_workspaces.named(operator_workspaces.log_sum_exp_rows, heads=heads, length=length)
        lse = self.tape.store(f"{name} log-sum-exp", ("b", heads, length), "fp32", citation, rule=rows)
        sizes = {"heads": heads, "head_dim": head_dim, "value_dim": y.shape[-1], "length": length}
        item_bytes = DTYPE_BYTES[q.dtype]
        outputs, scratch = (
            self.tape.store(f"{name} {what}", (), "uint8", citation, rule=rule)
            for what, rule in (
                (
                    "fp32 output",
                    operator_workspaces.named(operator_workspaces.efficient_forward, **sizes, item_bytes=item_bytes),
                ),
                (
                    "backward accumulators",
                    operator_workspaces.named(operator_workspaces.efficient_backward, **sizes, item_bytes=item_bytes),
                ),
            )
        )
        saved = (*dict.fromkeys(t.storage for t in (q, k, v, *mask, y)), lse)
        # A boolean mask is expanded to all heads, and its copy holds each head's; an additive mask may be shared.
        own, whole = masked or self.autocast, ("b", heads, length, length)
        seen = tuple(Tensor(each.storage if own else -1, whole, each.dtype, strided=masked) for each in mask)
        node = Node(
            name,
            (q, k, v, *mask),
            (y,),
            saved,
            (NEW, NEW, NEW, *(None for _ in mask)),
            forward=ForwardMemory(also=(lse,), temporaries=(outputs,)),
            backward=BackwardMemory(temporaries=(scratch, *self._dropped(q, k, v))),
            variables=(*_by_head(q, k, v), *seen, *_by_head(y), self.tape.full_tensor(lse), *SEED_AND_OFFSET),
        )
        self.tape.record(node)
        return y

    def added_mask(self, x: Tensor, length: str, heads: str) -> Tensor:
        """An additive mask in the kernel's dtype with padded rows: a copy, unless the mask already has both."""
        if self.autocast:
            return self.mask_in_dtype(self.compute, length, heads)
        sizes = {"length": length, "item_bytes": DTYPE_BYTES[x.dtype], "heads": heads}
        rule = operator_workspaces.named(operator_workspaces.padded_mask, **sizes)
        storage = self.tape.store("mask, padded", (), "uint8", "ATen native/transformers/attention.cpp", rule=rule)
        y = Tensor(storage, x.shape, x.dtype, grad=False)
        self.tape.record(Node("mask, padded", (), (y,), (), ()))
        return y

    def mask_in_dtype(self, dtype: str, length: str, heads: str = "1") -> Tensor:
        """The mask that the kernel adds to the scores: 0 or -inf, with rows padded to a multiple of 8."""
        citation = "ATen native/transformers/attention.cpp"
        sizes = {"length": length, "item_bytes": DTYPE_BYTES[dtype], "heads": heads}
        made = None
        for name, rule in (
            ("mask before padding", operator_workspaces.mask_before_padding),
            ("mask in dtype", operator_workspaces.mask_in_dtype),
        ):
            storage = self.tape.store(name, (), "uint8", citation, rule=operator_workspaces.named(rule, **sizes))
            before = () if made is None else (made,)
            made = Tensor(storage, ("b", length, length), dtype, grad=False)
            self.tape.record(Node(name, before, (made,), (), (None,) * len(before)))
        assert made is not None
        return made


def _by_head(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors as kernels get them: transposed to heads before tokens, so not contiguous."""
    return tuple(Tensor(tensor.storage, tensor.shape, tensor.dtype, strided=True) for tensor in tensors)
