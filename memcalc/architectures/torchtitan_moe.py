"""torchtitan's mixture of experts: router, tokens sorted by expert, grouped GEMMs, and the way back.

Routing is assumed to be balanced: every expert gets the same number of rows, and every rank receives as many rows as it
sends. Sources: torchtitan 0.2.2 torchtitan/models/moe/moe.py and utils.py; distributed/expert_parallel.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from memcalc.architectures.structure import BlockStructure
from memcalc.programs.tape import Node, Tensor

if TYPE_CHECKING:
    from memcalc.architectures.torchtitan import TorchtitanLayer

TOKENS = ("b", "s")
CHOSEN = (*TOKENS, "k")
COPIES, WITH_EMPTY_ROW, PADDED = "C", "C+1", "C_p"
EXPERTS = "mlp.experts"


class RouterKind(NamedTuple):
    """How a model's router scores experts (MoEArgs of its flavors).

    Args:
        score: the function of the logits: softmax or sigmoid.
        normalized: whether the weights of a token's experts are divided by their sum (route_norm).
        weighs_before: whether tokens are weighed before the experts, not their results (score_before_experts).
    """

    score: str
    normalized: bool = False
    weighs_before: bool = False


# torchtitan 0.2.2 torchtitan/models/{qwen3,deepseek_v3,llama4}/__init__.py, by the architecture of the same sizes.
ROUTERS = {
    "qwen3_moe": RouterKind("softmax", normalized=True),
    "deepseek_v2": RouterKind("softmax"),
    "deepseek_v3": RouterKind("sigmoid", normalized=True),
    "llama4_text": RouterKind("sigmoid", weighs_before=True),
}


EXCHANGED = ("exchanged token copies", "exchanged expert outputs")


def kept_exchanges(c: BlockStructure, nodes: Sequence[Node]) -> list[Node]:
    """Return the all-to-alls with results that selective recomputation keeps: not Qwen3's.

    Source: torchtitan 0.2.2 torchtitan/models/{llama4,deepseek_v3,qwen3}/infra/parallelize.py, _op_sac_save_list.
    """
    return [] if c.experts.family == "qwen3_moe" else [node for node in nodes if node.name in EXCHANGED]


class TorchtitanMoe:
    """Writer of MoE.forward.

    Args:
        layer: the writer of the layer.
    """

    def __init__(self, layer: TorchtitanLayer) -> None:
        self.layer = layer
        self.c, self.ops, self.tape = layer.c, layer.ops, layer.tape
        self.kind = ROUTERS[layer.c.experts.family]
        self.exchanges = layer.c.sharding.expert_parallel
        self.local = "E/e" if self.exchanges else "E"
        self.inner = f"F_e{layer.c.sharding.expert_suffix}"

    def output(self, normed: Tensor) -> Tensor:
        """MoE.forward, with what PrepareModuleInputOutput gathers and scatters under tensor parallelism."""
        ops, split = self.ops, self.layer.split
        x = split.module_input(normed, "mlp")
        weights, chosen, counts = self.route(x)
        by_expert, order, counts_here = self.order_by_expert(weights, chosen)
        self.tape.still_referenced(counts)  # rebound to the reorderer's counts
        source = ops.table("source of each copy", (COPIES,), "int64", "aten::floor_divide", of=(order,))
        sent = ops.rows_at(x, source, (COPIES, "d"), "token copies by expert", TOKENS)
        if self.kind.weighs_before:
            wide = ops.cast(sent, "fp32", "token copies in fp32")
            self.tape.still_referenced(sent)
            sent = ops.cast(ops.weigh(wide, by_expert, "weighed token copies"), sent.dtype, "weighed token copies cast")
        received = self.experts(sent)
        shared = None
        if self.c.experts.shared:
            shared = self.layer.feed_forward(x, "mlp.shared_experts.", "F_s", shared=True)
        total = self.combined(received, order, weights)
        self.tape.still_referenced(by_expert, order, counts_here, sent, received, weights, chosen)
        if shared is not None:
            total = ops.add(shared, total, "sum with shared expert")
        summed = split.summed(total, "sum of experts")
        split.returned(x, total)
        return summed

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """TokenChoiceTopKRouter.forward: the weights, the chosen experts, and how many copies each expert gets."""
        ops, tape = self.ops, self.tape
        logits = ops.linear(x, "mlp.router", ("E", "d"), (*TOKENS, "E"), bias=False)
        wide = ops.cast(logits, "fp32", "router logits in fp32")
        if self.kind.score == "softmax":
            scores = ops.softmax(wide, "router scores")
        else:
            scores = ops.pointwise(wide, "router scores", saves="output")
        tape.still_referenced(logits)
        ranked = ops.table("scores with the bias of load balancing", scores.shape, "fp32", of=(scores,))
        best = ops.table("the largest scores", CHOSEN, "fp32", "aten::topk", of=(ranked,))
        chosen = ops.table("chosen experts", CHOSEN, "int64", "aten::topk", of=(ranked,))
        weights = ops.gather(scores, CHOSEN, "router weights", values=True, index=chosen)
        if self.kind.normalized:
            divisor = ops.shift(ops.row_total(weights, "sum of router weights"), "sum of router weights, not zero")
            weights = ops.divide(weights, divisor, "normalized router weights")
        given, weights = weights, ops.scale(weights, "scaled router weights")
        tape.still_referenced(given)
        counts = ops.table("copies of each expert", ("E",), "int64", "aten::histc", of=(chosen,))
        tape.still_referenced(scores, ranked, best)
        return weights, chosen, counts

    def order_by_expert(self, weights: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """TokenReorderer.forward: weights in the order of experts, the order, and how many copies each expert gets."""
        ops = self.ops
        flat = Tensor(chosen.storage, (COPIES,), "int64", grad=False)
        counts = ops.table("copies of each expert, of this rank", ("E",), "int64", "aten::histc", of=(chosen,))
        _, order = ops.sorted_order(flat, "order of token copies")
        if self.kind.weighs_before:
            by_expert = ops.rows_at(weights, order, (COPIES,), "router weights by expert", CHOSEN)
        else:  # read by nothing
            by_expert = ops.table("router weights by expert", (COPIES,), "fp32", "aten::index", of=(weights, order))
        return by_expert, order, counts

    def experts(self, sent: Tensor) -> Tensor:
        """GroupedExperts.forward, with the exchange of rows under expert parallelism before and after it."""
        ops, tape, given = self.ops, self.tape, sent
        if self.c.sharding.expert_suffix and self.c.sharding.dtensor:  # TensorParallel, ExpertTensorParallel: Partial
            sent = ops.replicated(sent, "token copies by expert")
        if not self.exchanges:
            return self.looped(sent, COPIES) if self.c.experts.loops else self.padded(sent)[0]
        sent = ops.all_to_all(sent, (COPIES, "d"), EXCHANGED[0], f"{EXPERTS}.gate_proj")
        found, rows, done = self.padded(sent)
        found = ops.all_to_all(found, (COPIES, "d"), EXCHANGED[1], f"{EXPERTS}.down_proj")
        tape.still_referenced(given, rows, done)  # the arguments and the result of the module, which hooks replace
        return found

    def padded(self, sent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The rows of each expert, padded to a multiple of 8, through the experts.

        Returns:
            The results in the order of the rows; and what the experts are given, and return.
        """
        ops, tape, layer = self.ops, self.tape, self.layer
        kernels = "torchtitan 0.2.2 torchtitan/models/moe/kernels.py"
        index = Tensor(tape.store("rows of experts", (PADDED,), "int32", kernels), (PADDED,), "int32", grad=False)
        layer.record_table(index)
        sizes = ops.table("padded rows of each expert", (self.local,), "int32", kernels)
        padded = ops.with_empty_row(sent, (WITH_EMPTY_ROW, "d"))
        rows = ops.rows_at_int32(padded, index, (PADDED, "d"), "padded token copies")
        tape.still_referenced(padded, sent)
        done = self.looped(rows, PADDED) if self.c.experts.loops else self.grouped(rows, sizes)
        placed = ops.rows_placed(done, index, (WITH_EMPTY_ROW, "d"), "expert outputs of the copies")
        tape.still_referenced(sizes)
        return ops.without_last_row(placed, (COPIES, "d"), "expert outputs without the empty row"), rows, done

    def grouped(self, rows: Tensor, sizes: Tensor) -> Tensor:
        """_run_experts_grouped_mm: a grouped GEMM for each weight."""
        ops, inner = self.ops, self.inner
        ends = ops.table("ends of groups", (self.local,), "int32", "aten::cumsum", of=(sizes,))
        gate = ops.grouped_gemm(rows, ends, f"{EXPERTS}.gate_proj", (self.local, inner, "d"), (PADDED, inner))
        activated = ops.pointwise(gate, f"{EXPERTS}.silu")
        up = ops.grouped_gemm(rows, ends, f"{EXPERTS}.up_proj", (self.local, inner, "d"), (PADDED, inner))
        product = ops.mul(activated, up, f"{EXPERTS}.silu(gate) * up")
        done = ops.grouped_gemm(product, ends, f"{EXPERTS}.down_proj", (self.local, "d", inner), (PADDED, "d"))
        self.tape.still_referenced(rows)
        return done

    def looped(self, rows: Tensor, count: str) -> Tensor:
        """_run_experts_for_loop: a matmul of each expert for each weight, counted together."""
        ops, inner = self.ops, self.inner
        ends = ops.table("rows of each expert", (self.local,), "int32", "aten::tolist")
        gate = ops.matmul_of_each(rows, ends, f"{EXPERTS}.gate_proj", (self.local, inner, "d"), (count, inner))
        activated = ops.pointwise(gate, f"{EXPERTS}.silu")
        up = ops.matmul_of_each(rows, ends, f"{EXPERTS}.up_proj", (self.local, inner, "d"), (count, inner))
        product = ops.mul(activated, up, f"{EXPERTS}.silu(gate) * up")
        done = ops.matmul_of_each(product, ends, f"{EXPERTS}.down_proj", (self.local, "d", inner), (count, "d"))
        joined = ops.joined_rows(done, (count, "d"), "expert outputs")
        stacked = ops.joined_rows(joined, (count, "d"), "expert outputs with padding")
        self.tape.still_referenced(done, rows)
        return stacked

    def combined(self, received: Tensor, order: Tensor, weights: Tensor) -> Tensor:
        """Return the sum of each token's expert outputs, in the order of tokens."""
        ops, tape = self.ops, self.tape
        rows = (*CHOSEN, "d")
        unsorted = ops.rows_placed(received, order, rows, "expert outputs by token")
        if self.kind.weighs_before:
            total = ops.sum_of_copies(unsorted, (*TOKENS, "d"), "sum of experts")
        else:
            wide = ops.cast(unsorted, "fp32", "expert outputs in fp32")
            summed = ops.weighted_sum(weights, wide, (*TOKENS, "d"), "weighted expert outputs")
            total = ops.cast(summed, received.dtype, "weighted expert outputs cast")
        tape.still_referenced(unsorted)
        return total
