"""Ring attention of PyTorch's context parallelism."""

from __future__ import annotations

from memcalc.ledger.component import Component
from memcalc.operators.base import Base
from memcalc.programs.operator_workspaces import named, ring_backward, ring_forward, ring_output_by_token
from memcalc.programs.tape import NEW, PREPARED, SAME, BackwardMemory, ForwardMemory, Node, Tensor
from memcalc.spec.recipes import DTYPE_BYTES

SOURCE = "torch distributed/tensor/experimental/_context_parallel/_attention.py"


class RingAttention(Base):
    """Flash attention over the keys of all ranks that share a sequence."""

    def ring_attention(
        self, q: Tensor, k: Tensor, v: Tensor, heads: str, kv_heads: str, head_dim: str, rotation: str
    ) -> Tensor:
        """Blocks of flash attention, merged in fp32; saves q, k, v, the output by token and fp32 log-sum-exps.

        Forward's blocks are an operator of their own, because they run before the output is allocated. The gradients of
        keys and values are parts of one tensor.

        Args:
            q: queries.
            k: keys.
            v: values.
            heads: axis of the query heads.
            kv_heads: axis of the key/value heads.
            head_dim: axis of the head dimension.
            rotation: "ring" or "all-gather".
        """
        v, k, q = (self.autocast_input(t, "attention") for t in (v, k, q))
        store = self.tape.store
        sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "length": "s", "rotation": rotation}
        item_bytes = DTYPE_BYTES[q.dtype]
        blocks, blocks_again = (
            store(f"attention {what}", (), "uint8", SOURCE, rule=named(rule, **sizes, item_bytes=item_bytes))
            for what, rule in (("blocks", ring_forward), ("backward blocks", ring_backward))
        )
        self.tape.record(Node("attention blocks", (q, k, v), (), (), (None,) * 3, forward=ForwardMemory((blocks,))))
        y = self.tape.new("attention output", q.shape, q.dtype, SOURCE)
        lse = store("attention log-sum-exp", ("b", heads, "s"), "fp32", SOURCE)
        state, mask = (
            store(f"attention {what}", (count,), "int64", SOURCE, component=Component.TEMPORARIES)
            for what, count in (("random state", "2"), ("unused mask", "1"))
        )
        gradient = store("gradient of k and v", ("2", *k.shape), k.dtype, SOURCE)
        kept = (lse, state, mask)
        node = Node(
            "attention",
            (q, k, v),
            (y,),
            (*dict.fromkeys(t.storage for t in (q, k, v, y)), *kept),
            (NEW, PREPARED, PREPARED),
            forward=ForwardMemory(also=kept),
            backward=BackwardMemory(
                prepares=((blocks_again, 1), (blocks_again, -1), (gradient, 1), (gradient, 1)),
                prepared=(gradient, gradient),
            ),
        )
        self.tape.record(node)
        return y

    def ring_output_by_token(self, y: Tensor, heads: str, head_dim: str) -> Tensor:
        """A copy of the output with the heads of each token together, which the last rank's output has already."""
        name, item_bytes = "attention output by token", DTYPE_BYTES[y.dtype]
        rule = named(ring_output_by_token, heads=heads, head_dim=head_dim, length="s", item_bytes=item_bytes)
        copy = Tensor(self.tape.store(name, y.shape, y.dtype, "aten::clone", rule=rule), y.shape, y.dtype)
        self.tape.record(Node(name, (y,), (copy,), (), (SAME,)))
        return copy
