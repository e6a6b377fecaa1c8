"""Cost model: seconds of one optimizer step at published peak rates, as a sum of terms.

It ranks layouts and does not predict wall-clock time: no run reaches these rates, and nothing overlaps. All terms are
of the slowest rank, for the same sequences per step. TERMS gives the meaning and the source of each.
"""

from __future__ import annotations

from functools import lru_cache
from math import fsum
from typing import NamedTuple

from memcalc.layout.parameters import parameter_table
from memcalc.spec.hardware.interconnect import System
from memcalc.spec.model import ModelSpec
from memcalc.spec.recipes import DTYPE_BYTES, RECIPES
from memcalc.spec.recompute_plan import Segment, leaves
from memcalc.spec.spec import Spec

TERMS = {
    "compute": (
        "forward and backward, 2 and 4 (frozen: 2) operations for each parameter and token, and attention",
        "Kaplan et al., arXiv 2001.08361, section 2.1; Narayanan et al., arXiv 2104.04473, appendix",
    ),
    "recompute": (
        "recomputed FLOPs: layers (full), attention (selective)",
        "Korthikanti et al., arXiv 2205.05198, section 5",
    ),
    "tensor": (
        "4 all-reduces per layer over t ranks, 2 more if it is recomputed: 2(t-1)/t of its output each",
        "Shoeybi et al., arXiv 1909.08053, section 3; rings: NVIDIA nccl-tests, doc/PERFORMANCE.md",
    ),
    "context": (
        "a ring of keys and values over c ranks, once in forward and twice in backward; or four all-to-alls of heads",
        "Liu et al., arXiv 2310.01889; Jacobs et al., arXiv 2309.14509",
    ),
    "expert": (
        "all-to-all of tokens to experts and back, in forward and backward: (e-1)/e of k copies each",
        "Lepikhin et al., arXiv 2006.16668",
    ),
    "pipeline": (
        "a micro-batch's hidden state to the next stage, its gradient back, for each chunk of layers; 1/t by each rank",
        "Narayanan et al., arXiv 2104.04473, sections 2.2 and 4.1",
    ),
    "bubble": (
        "pipeline bubble: (p-1)/(v·m) of all the above except the sends",
        "Narayanan et al., arXiv 2104.04473, section 2.2",
    ),
    "data": (
        "gradients G and ZeRO's weights W over N·c ranks: 2G, G+W, mG+W, m(2W+G) in stage 0, 1, 2, 3, less 1/(N·c)",
        "Rajbhandari et al., arXiv 1910.02054, section 7",
    ),
}


Recompute = str | Segment


class Costs(NamedTuple):
    """Seconds of one optimizer step, by term; TERMS defines each."""

    compute: float
    recompute: float
    tensor: float
    context: float
    expert: float
    pipeline: float
    bubble: float
    data: float

    @property
    def total(self) -> float:
        """Sum of all terms, rounded once: `sum` of floats differs between versions of Python in the last digit."""
        return fsum(self)


def sequences_of(spec: Spec) -> int:
    """Return the sequences of one optimizer step."""
    training = spec.training
    if training.global_batch_size is not None:
        return training.global_batch_size
    return training.micro_batch_size * training.gradient_accumulation_steps * spec.parallelism.data_parallel


def fixed_sequences(spec: Spec) -> int | None:
    """Return the sequences per optimizer step for any number of GPUs; None: micro-batch and accumulation per GPU.

    The global batch if given; else the batch of a run that already uses several GPUs.
    """
    if spec.training.global_batch_size is not None:
        return spec.training.global_batch_size
    return sequences_of(spec) if spec.parallelism.ranks > 1 else None


def step_sequences(spec: Spec, gpus: int) -> int:
    """Return the sequences per optimizer step, equal for all layouts so that they can be compared."""
    own = gpus * spec.training.micro_batch_size * spec.training.gradient_accumulation_steps
    return fixed_sequences(spec) or own


def token_seconds(spec: Spec, system: System) -> float:
    """Return GPU seconds per token, by the cost model."""
    tokens = sequences_of(spec) * spec.training.sequence_length
    return costs_of(spec, system).total * spec.parallelism.ranks / tokens


def costs_of(spec: Spec, system: System) -> Costs:
    """Return the costs of the unchanged run."""
    training = spec.training
    step = StepCost(spec, system, sequences_of(spec))
    return step.costs(training.recompute, training.micro_batch_size)


class StepCost:
    """One optimizer step of a layout: its costs for any recomputation and micro-batch.

    Args:
        spec: the layout; its recomputation and micro-batch are ignored.
        system: the node and network.
        sequences: per optimizer step, over all replicas.
    """

    def __init__(self, spec: Spec, system: System, sequences: int) -> None:
        self._spec, self._system = spec, system
        model, training, parallelism = spec.model, spec.training, spec.parallelism
        t, c, n = parallelism.tensor_parallel, parallelism.context_parallel, parallelism.data_parallel
        self._work = work = work_of(model)
        self._layers = -(-model.num_layers // parallelism.pipeline_parallel)  # of the fullest stage
        self._sequences = sequences / n  # of one replica
        self._tokens = self._sequences * training.sequence_length / c  # of one rank
        self._width = DTYPE_BYTES[training.dtype]
        per_layer = self._tokens / t / system.flops
        context = training.sequence_length * work.attention_flops
        self._layer = (work.layer_flops + context) * per_layer  # seconds of one layer's forward
        self._attention = context * per_layer
        self._sums = self._sums_of_a_layer()
        self._rings = self._rings_of_a_layer()
        self._experts = self._experts_of_a_layer()
        self._forward = self._slowest_forward(work.head_flops * per_layer)

    def costs(self, recompute: Recompute, micro_batch: int) -> Costs:
        """Return the terms; `recompute` as in a configuration."""
        parallelism = self._spec.parallelism
        again = self._again(recompute)
        core = recompute == "selective" and "core_attn" in self._spec.training.recompute_modules
        compute = (3 if self._spec.training.finetune == "full" else 2) * self._forward
        recomputed = self._layers * (self._attention if core else again * self._layer)
        tensor = self._layers * self._sums * (2 + again)
        context = self._layers * self._rings * (3 + (1 if core else again))
        expert = self._layers * self._experts * (2 + again)
        steps = self._sequences / micro_batch
        chunks = parallelism.virtual_stages
        waiting = (parallelism.pipeline_parallel - 1) / (chunks * steps)
        bubble = waiting * (compute + recomputed + tensor + context + expert)
        return Costs(
            compute, recomputed, tensor, context, expert, self._sent_to_stages(chunks), bubble, self._reduced(steps)
        )

    def _again(self, recompute: Recompute) -> float:
        """Return recomputed layers as a fraction of all; nested segments count once per level."""
        if isinstance(recompute, tuple):
            return sum(_runs(item) for item in recompute) / self._spec.model.num_layers
        if recompute.startswith("every-"):
            return 1 / int(recompute.removeprefix("every-"))
        return 1.0 if recompute == "full" else 0.0

    def _slowest_forward(self, head: float) -> float:
        """Return the seconds of the slowest stage's forward: the fullest stage, or the last one with its logits."""
        layers, stages = self._spec.model.num_layers, self._spec.parallelism.pipeline_parallel
        return max(self._layers * self._layer, layers // stages * self._layer + head)

    def _sums_of_a_layer(self) -> float:
        """Return seconds of the tensor-parallel all-reduces in the forward of one layer."""
        t = self._spec.parallelism.tensor_parallel
        sums = 1 if self._spec.model.parallel_block else 2
        size = self._tokens * self._spec.model.hidden_size * self._width
        return sums * 2 * (t - 1) / t * size / self._system.group_bytes(t, 1)

    def _rings_of_a_layer(self) -> float:
        """Return the seconds of the context-parallel exchange in the forward of one layer."""
        model, parallelism = self._spec.model, self._spec.parallelism
        c, t = parallelism.context_parallel, parallelism.tensor_parallel
        if c == 1:
            return 0.0
        keys_and_values = 2 * max(model.key_value_size / t, model.head_dim)
        if parallelism.context_parallel_method != "all-to-all":
            elements = (c - 1) * keys_and_values  # each rank forwards every other rank's shard
        else:
            elements = (c - 1) / c * (keys_and_values + 2 * model.query_size / t)
        return self._tokens * elements * self._width / self._system.group_bytes(c, t)

    def _experts_of_a_layer(self) -> float:
        """Return the seconds of the two token exchanges (all-to-all) in the forward of the average layer."""
        model, parallelism = self._spec.model, self._spec.parallelism
        e = parallelism.expert_parallel
        if model.moe is None or e == 1:
            return 0.0
        tokens = self._tokens / (parallelism.tensor_parallel if parallelism.sequence_parallel else 1)
        share = model.layers_with_experts(0, model.num_layers) / model.num_layers
        size = 2 * (e - 1) / e * tokens * model.moe.num_experts_per_token * model.hidden_size * self._width
        return share * size / self._system.group_bytes(e, parallelism.tensor_parallel)

    def _sent_to_stages(self, chunks: int) -> float:
        parallelism = self._spec.parallelism
        p, t = parallelism.pipeline_parallel, parallelism.tensor_parallel
        if p == 1:
            return 0.0
        stride = t * parallelism.context_parallel * parallelism.data_parallel
        inside = p * stride <= self._system.node
        rate = self._system.link_bytes if inside else min(self._system.nic_bytes, self._system.link_bytes)
        size = self._tokens * self._spec.model.hidden_size * self._width / t
        return 2 * chunks * size / rate

    def _reduced(self, steps: float) -> float:
        """Return seconds of data-parallel communication; routed experts have separate groups."""
        parallelism, work = self._spec.parallelism, self._work
        t, n = parallelism.tensor_parallel, parallelism.data_parallel * parallelism.context_parallel
        share = self._layers / self._spec.model.num_layers
        ends = work.embedding_and_head if parallelism.pipeline_parallel == 1 else work.ends
        dense = (work.layers * share + ends) / t
        seconds = self._exchanged(dense, n, t, steps)
        if work.experts:
            parts = parallelism.expert_parallel * parallelism.expert_width_ranks
            ranks = max(n * t // parts, 1)
            seconds += self._exchanged(work.experts * share / parts, ranks, parts, steps)
        return seconds

    def _exchanged(self, parameters: float, ranks: int, stride: int, steps: float) -> float:
        """Return seconds for the gradients of `parameters` over ranks that are `stride` GPUs apart."""
        parallelism = self._spec.parallelism
        gradients, weights = (parameters * size for size in _exchanged_bytes(self._spec))
        groups = min(parallelism.data_parallel_replicate, ranks)
        inner = ranks // groups
        size = {
            0: 2 * gradients,
            1: gradients + weights,
            2: steps * gradients + weights,
            3: steps * (2 * weights + gradients),
        }[parallelism.zero_stage]
        seconds = (inner - 1) / inner * size / self._system.group_bytes(inner, stride)
        if groups > 1:  # all-reduce of each rank's reduced shard over the groups
            outer = self._system.group_bytes(groups, stride * inner)
            seconds += 2 * (groups - 1) / groups * gradients / inner / outer
        return seconds


def _runs(item: int | Segment) -> int:
    """Return how many forwards of layers an item of a plan recomputes."""
    if isinstance(item, int):
        return 1
    return len(list(leaves(item))) + sum(_runs(inner) for inner in item if not isinstance(inner, int))


def _exchanged_bytes(spec: Spec) -> tuple[int, int]:
    """Return bytes per parameter of gradient and weight in communication; 0 with adapters."""
    training = spec.training
    if training.finetune != "full":
        return 0, 0
    recipe, compute = RECIPES[training.recipe], DTYPE_BYTES[training.dtype]
    fsdp = spec.parallelism.fsdp
    weight = compute if recipe.weights == "compute" or fsdp.param_dtype is not None else 4
    if reduced := fsdp.reduce_dtype or fsdp.param_dtype:
        return DTYPE_BYTES[reduced], weight
    if training.gradient_dtype is not None:
        return DTYPE_BYTES[training.gradient_dtype], weight
    if recipe.main_gradients_live == "always":
        return 4, weight
    return (compute if recipe.gradients == "compute" else 4), weight


class Workload(NamedTuple):
    """Sizes of a model. Operations are FLOPs (multiplications plus additions) of one token's forward.

    Args:
        layers: parameters of all layers without routed experts.
        experts: parameters of routed experts.
        ends: parameters of embedding, LM head and final norm; the larger end if they are on different stages.
        both_ends: parameters of both ends together; a tied weight counts once.
        layer_flops: of the weight matrices of the average layer.
        attention_flops: of the average layer's attention itself, per token of context.
        head_flops: of the logits.
    """

    layers: int
    experts: int
    ends: int
    embedding_and_head: int
    layer_flops: float
    attention_flops: float
    head_flops: float


@lru_cache(maxsize=64)
def work_of(model: ModelSpec) -> Workload:
    """Return the sizes of a model."""
    layers = experts = 0
    ends = {"embedding": 0, "head": 0}
    for row in parameter_table(model):
        if row.part != "layer":
            ends[row.part] += row.total
        elif ".experts." in row.module:
            experts += row.total
        else:
            layers += row.total
    visited = 0.0  # parameters of the experts that one token is routed to
    if model.moe is not None:
        visited = experts * model.moe.num_experts_per_token / model.moe.num_experts
    logits = model.head_rows * model.embedding_size
    return Workload(
        layers=layers,
        experts=experts,
        ends=max(ends["embedding"], ends["head"], logits),
        embedding_and_head=sum(ends.values()),
        # two operations per parameter (Kaplan et al., arXiv 2001.08361, section 2.1)
        layer_flops=2 * (layers + visited) / model.num_layers,
        # attention scores and their product with the values: 2 x 2·s·h·d_h (Megatron-LM, arXiv 2104.04473, appendix),
        # of which a causal kernel computes half
        attention_flops=4 * model.query_size / 2,
        head_flops=2 * logits,
    )
