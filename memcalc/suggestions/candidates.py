"""Single changes of a run that may save memory, the cheapest first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from memcalc.spec.defaults import engines_of_stages
from memcalc.spec.optimizers import OPTIMIZERS
from memcalc.spec.spec import Spec
from memcalc.units import divisors

RESULTS = (SAME, MORE_GPUS, OTHER_CARD, OTHER_RESULT) = (
    "same result",
    "same result, more GPUs",
    "same result, another GPU",
    "another result",
)  # what a change requires: at most time; more GPUs; another GPU; a different training result

NONE = "none"  # the cost of a change that is free

# Segments that expand instead of new ones: reserved memory is close to allocated memory (CUDA 11.3 and later).
EXPANDABLE = "expandable_segments:True"
ALLOCATOR = "allocator settings"

FACTORS = (2, 4, 8)  # multiples of the number of GPUs to try


class ChangeCandidate(NamedTuple):
    """A change; of several with the same lever, the first that fits is enough."""

    lever: str  # the kind of change, such as "shard more"
    overrides: tuple[str, ...]  # as --set takes them
    cost: str  # in time or money, as text
    result: str  # one of RESULTS


def candidates(spec: Spec) -> Iterator[ChangeCandidate]:
    """Yield possible changes by rising cost: nothing, time, communication, GPUs, the result of training.

    Changes that keep the result also keep the number of sequences per step.
    """
    training = spec.training
    if not training.alloc_conf:
        yield ChangeCandidate(ALLOCATOR, (f"training.alloc_conf={EXPANDABLE}",), NONE, SAME)
    if training.zero_grad == "zero":
        yield ChangeCandidate("free gradients", ("training.zero_grad=set_to_none",), NONE, SAME)
    if training.attention == "eager":
        yield ChangeCandidate("flash attention", ("training.attention=flash",), "none: it is faster", SAME)
    fused = "fused" in OPTIMIZERS[training.optimizer].implementations
    if fused and training.optimizer_implementation == "foreach":
        yield ChangeCandidate("fused update", ("training.optimizer_implementation=fused",), NONE, SAME)
    if spec.parallelism.tensor_parallel > 1 and not spec.parallelism.sequence_parallel:
        overrides = ("parallelism.sequence_parallel=true",)
        yield ChangeCandidate("sequence parallelism", overrides, "none: the same bytes are communicated", SAME)
    yield from _smaller_micro_batches(spec)
    if training.loss == "materialized":
        yield ChangeCandidate("chunked loss", ("training.loss=chunked",), "little time", SAME)
    if training.recompute == "none" and training.attention == "eager":
        yield ChangeCandidate("recompute attention", ("training.recompute=selective",), "a little more compute", SAME)
    if training.recompute != "full":
        yield ChangeCandidate(
            "recompute all", ("training.recompute=full",), "one more forward: a third more compute", SAME
        )
    if training.offload_activations == "none":
        overrides = ("training.offload_activations=pageable",)
        yield ChangeCandidate(
            "offload activations", overrides, "saved activations are copied to host memory and back", SAME
        )
    yield from _sharding(spec)
    yield from _replicas(spec)
    yield from _splitting(spec)
    yield from _rounding(spec)
    yield from _adapting(spec)
    yield from _shorter_sequences(spec)


def _smaller_micro_batches(spec: Spec) -> Iterator[ChangeCandidate]:
    """Yield smaller micro-batches with more accumulation, so that a step has the same sequences."""
    largest = spec.training.micro_batch_size
    sequences = largest * spec.training.gradient_accumulation_steps
    for size in reversed([each for each in divisors(sequences) if each < largest]):
        steps = f"training.gradient_accumulation_steps={sequences // size}"
        overrides = (f"training.micro_batch_size={size}", steps)
        yield ChangeCandidate("smaller micro-batch", overrides, "smaller matmuls", SAME)


def _sharding(spec: Spec) -> Iterator[ChangeCandidate]:
    """Yield changes that use the existing ranks: higher ZeRO stages, offload to the host, and expert parallelism."""
    parallelism = spec.parallelism
    if parallelism.data_parallel == 1:
        if parallelism.ranks == 1 and parallelism.offload == "none" and spec.training.finetune != "qlora":
            yield from _offloads_of_one_gpu(spec.training.recipe)
        return
    for stage in _stages(spec):
        yield ChangeCandidate("shard more", _stage(spec, stage), _STAGE_COSTS[stage], SAME)
    if parallelism.offload == "none" and not _of_megatron(spec):
        for overrides in _offloads(spec):
            yield ChangeCandidate("offload", overrides, "offload optimizer states; the CPU updates the weights", SAME)
    if spec.model.moe is not None:
        for factor in FACTORS:
            overrides = (f"parallelism.expert_parallel={parallelism.expert_parallel * factor}",)
            yield ChangeCandidate("shard experts", overrides, "all-to-all of tokens", SAME)


def _of_megatron(spec: Spec) -> bool:
    """Return whether Megatron-Core shards the run: its modules run under its own engine or plain DDP only."""
    return spec.parallelism.engine == "megatron" or spec.training.implementation == "megatron"


def _stages(spec: Spec) -> range:
    """Return the ZeRO stages above the run's; Megatron-Core's distributed optimizer is stage 1, and it has no other."""
    return range(spec.parallelism.zero_stage + 1, 2 if _of_megatron(spec) else 4)


def _offloads_of_one_gpu(recipe: str) -> Iterator[ChangeCandidate]:
    """Yield DeepSpeed's offload on a single GPU: of the optimizer states, then of the weights, too.

    Its recipe of 16-bit weights keeps no fp32 gradients beside the master weights.
    """
    recipes = ("training.recipe=mixed-16",) if recipe in ("mixed-18", "mixed-20") else ()
    for stage, what, cost in (
        (2, "optimizer", "offload optimizer states; the CPU updates the weights"),
        (3, "all", "offload weights, too; they are copied to the GPU for each module"),
    ):
        engine = ("parallelism.engine=deepspeed", f"parallelism.zero_stage={stage}", f"parallelism.offload={what}")
        overrides = (*engine, *recipes)
        rounds = "; gradients are in 16 bits" if recipes else ""
        yield ChangeCandidate("offload with DeepSpeed", overrides, cost + rounds, SAME)


def _offloads(spec: Spec) -> Iterator[tuple[str, ...]]:
    """Yield DeepSpeed's optimizer offload if it shards that already; then FSDP2's CPUOffloadPolicy."""
    parallelism = spec.parallelism
    if parallelism.engine == "deepspeed" and parallelism.zero_stage > 1:
        yield ("parallelism.offload=optimizer",)
    sharded = parallelism.zero_stage == 3 and parallelism.engine == "fsdp2"
    defaults = ("parallelism.offload_pin_memory=true", "training.optimizer_implementation=for-loop")
    yield *(() if sharded else _stage(spec, 3)), "parallelism.offload=all", *defaults


_STAGE_COSTS = {
    1: "all-gather of weights after each step",
    2: "reduce-scatter of gradients",
    3: "all-gather of weights in forward and backward",
}


def _stage(spec: Spec, stage: int) -> tuple[str, ...]:
    engine = "megatron" if _of_megatron(spec) else engines_of_stages(spec.parallelism.schedule)[stage]
    return f"parallelism.zero_stage={stage}", f"parallelism.engine={engine}"


def _replicas(spec: Spec) -> Iterator[ChangeCandidate]:
    """Yield more data-parallel ranks; the sequences per step stay the same if they can be divided among the ranks."""
    training, parallelism = spec.training, spec.parallelism
    sharded = () if parallelism.zero_stage else _stage(spec, _stages(spec)[-1])
    own = training.micro_batch_size * training.gradient_accumulation_steps  # sequences of a replica
    for factor in FACTORS:
        price, share = f"{factor} times as many GPUs", own // factor
        more = (f"parallelism.data_parallel={parallelism.data_parallel * factor}", *sharded)
        if own % factor:
            free = () if training.global_batch_size is None else ("training.global_batch_size=null",)
            price += f", and {factor} times as many sequences per step"
            yield ChangeCandidate("shard over more GPUs", (*more, *free), price, OTHER_RESULT)
            continue
        micro = max(size for size in divisors(share) if size <= training.micro_batch_size)
        cut = () if micro == training.micro_batch_size else (f"training.micro_batch_size={micro}",)
        steps = (f"training.gradient_accumulation_steps={share // micro}",)
        kept = steps if share // micro != training.gradient_accumulation_steps else ()
        yield ChangeCandidate("shard over more GPUs", (*more, *cut, *kept), price, MORE_GPUS)


def _splitting(spec: Spec) -> Iterator[ChangeCandidate]:
    """Yield more tensor, pipeline or context parallelism."""
    splits = (
        ("tensor_parallel", "shard weight matrices", "all-reduce in each layer"),
        ("pipeline_parallel", "more pipeline stages", "idle time in the pipeline bubble"),
        ("context_parallel", "shard sequences", "keys and values are exchanged between ranks"),
    )
    for field, lever, price in splits:
        degree = getattr(spec.parallelism, field)
        for factor in FACTORS:
            overrides = (f"parallelism.{field}={degree * factor}",)
            yield ChangeCandidate(lever, overrides, f"{factor} times as many GPUs, {price}", MORE_GPUS)


def _rounding(spec: Spec) -> Iterator[ChangeCandidate]:
    """Yield optimizer states and recipes with fewer bits."""
    training = spec.training
    if training.optimizer in ("adam", "adamw") and not training.optimizer_options.amsgrad:
        overrides = ("training.optimizer=adam-8bit", "training.optimizer_implementation=for-loop")
        yield ChangeCandidate("8-bit optimizer states", overrides, "quantized moments", OTHER_RESULT)
    if training.recipe.startswith("mixed") and training.dtype == "bf16":
        freed = () if training.gradient_dtype is None else ("training.gradient_dtype=null",)
        yield ChangeCandidate(
            "16-bit weights and states", ("training.recipe=pure", *freed), "rounded weights", OTHER_RESULT
        )


def _adapting(spec: Spec) -> Iterator[ChangeCandidate]:
    if spec.training.finetune != "full":
        return
    for method, price in (("lora", "only adapters train"), ("qlora", "only adapters train, on a 4-bit base")):
        yield ChangeCandidate("train adapters", (f"training.finetune={method}",), price, OTHER_RESULT)


def _shorter_sequences(spec: Spec) -> Iterator[ChangeCandidate]:
    length = spec.training.sequence_length
    while length % 2 == 0 and length > 512:
        length //= 2
        yield ChangeCandidate(
            "shorter sequences", (f"training.sequence_length={length}",), "less context to learn from", OTHER_RESULT
        )
