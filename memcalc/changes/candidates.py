"""Single changes of a run that may save memory, the cheapest first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from memcalc.spec.optimizers import OPTIMIZERS
from memcalc.spec.spec import Spec

RESULTS = (SAME, MORE_GPUS, OTHER_CARD, OTHER_RESULT) = (
    "same result",
    "same result, more GPUs",
    "same result, another card",
    "another result",
)  # worse and worse

FACTORS = (2, 4, 8)  # how many times as many GPUs are offered


class Candidate(NamedTuple):
    """A change: of several with one lever, the first that fits is enough."""

    lever: str
    overrides: tuple[str, ...]
    cost: str
    result: str


def candidates(spec: Spec) -> Iterator[Candidate]:
    """What can be changed, by rising cost: nothing, time, communication, GPUs, the result of training."""
    training = spec.training
    if training.zero_grad == "zero":
        yield Candidate("free gradients", ("training.zero_grad=set_to_none",), "none", SAME)
    if training.attention == "eager":
        yield Candidate("flash attention", ("training.attention=flash",), "none: it is faster", SAME)
    fused = "fused" in OPTIMIZERS[training.optimizer].implementations
    if fused and training.optimizer_implementation == "foreach":
        yield Candidate("fused update", ("training.optimizer_implementation=fused",), "none", SAME)
    if spec.parallelism.tensor_parallel > 1 and not spec.parallelism.sequence_parallel:
        overrides = ("parallelism.sequence_parallel=true",)
        yield Candidate("sequence parallelism", overrides, "none: the same bytes travel", SAME)
    yield from _smaller_micro_batches(spec)
    if training.loss == "materialized":
        yield Candidate("chunked loss", ("training.loss=chunked",), "little time", SAME)
    if training.recompute == "none" and training.attention == "eager":
        yield Candidate("recompute attention", ("training.recompute=selective",), "a little more compute", SAME)
    if training.recompute != "full":
        yield Candidate("recompute all", ("training.recompute=full",), "one more forward: a third more compute", SAME)
    yield from _sharding(spec)
    yield from _splitting(spec)
    yield from _rounding(spec)
    yield from _adapting(spec)
    yield from _shorter_sequences(spec)


def _smaller_micro_batches(spec: Spec) -> Iterator[Candidate]:
    """Half, a quarter, ... with as much more accumulation, so that a step sees the same sequences."""
    size, steps = spec.training.micro_batch_size, spec.training.gradient_accumulation_steps
    while size % 2 == 0:
        size, steps = size // 2, steps * 2
        overrides = (f"training.micro_batch_size={size}", f"training.gradient_accumulation_steps={steps}")
        yield Candidate("smaller micro-batch", overrides, "smaller matrix products", SAME)


def _sharding(spec: Spec) -> Iterator[Candidate]:
    """ZeRO's next stages, then more ranks to shard over."""
    parallelism = spec.parallelism
    if parallelism.engine == "megatron":  # its distributed optimizer is stage 1, and there is no other
        if parallelism.zero_stage == 0 and parallelism.data_parallel > 1:
            yield Candidate("shard more", ("parallelism.zero_stage=1",), _STAGE_COSTS[1], SAME)
        return
    for stage in range(parallelism.zero_stage + 1, 4):
        if parallelism.data_parallel > 1:
            yield Candidate("shard more", _stage(stage), _STAGE_COSTS[stage], SAME)
    for factor in FACTORS:
        sharded = () if parallelism.zero_stage else _stage(3)
        more = (f"parallelism.data_parallel={parallelism.data_parallel * factor}", *sharded, *_free_batch(spec))
        yield Candidate("shard over more GPUs", more, f"{factor} times as many GPUs", MORE_GPUS)


_STAGE_COSTS = {1: "weights gathered after each step", 2: "gradients scattered", 3: "weights gathered as they are used"}


def _stage(stage: int) -> tuple[str, str]:
    return f"parallelism.zero_stage={stage}", f"parallelism.engine={'fsdp2' if stage == 3 else 'deepspeed'}"


def _free_batch(spec: Spec) -> tuple[str, ...]:
    return () if spec.training.global_batch_size is None else ("training.global_batch_size=null",)


def _splitting(spec: Spec) -> Iterator[Candidate]:
    """More ranks that split each matrix, the layers, or the sequence."""
    splits = (
        ("tensor_parallel", "split matrices", "each layer's sums exchanged"),
        ("pipeline_parallel", "more pipeline stages", "idle in the pipeline's bubble"),
        ("context_parallel", "split sequences", "keys and values exchanged"),
    )
    for field, lever, price in splits:
        degree = getattr(spec.parallelism, field)
        for factor in FACTORS:
            overrides = (f"parallelism.{field}={degree * factor}",)
            yield Candidate(lever, overrides, f"{factor} times as many GPUs, {price}", MORE_GPUS)


def _rounding(spec: Spec) -> Iterator[Candidate]:
    """Fewer bits for what the optimizer keeps."""
    training = spec.training
    if training.optimizer in ("adam", "adamw") and not training.optimizer_options.amsgrad:
        overrides = ("training.optimizer=adam-8bit", "training.optimizer_implementation=for-loop")
        yield Candidate("optimizer states in 8 bits", overrides, "rounded moments", OTHER_RESULT)
    if training.recipe.startswith("mixed") and training.dtype == "bf16":
        freed = () if training.gradient_dtype is None else ("training.gradient_dtype=null",)
        yield Candidate("16 bits all over", ("training.recipe=pure", *freed), "rounded weights", OTHER_RESULT)


def _adapting(spec: Spec) -> Iterator[Candidate]:
    if spec.training.finetune != "full":
        return
    for method, price in (("lora", "only adapters train"), ("qlora", "only adapters train, over a base in 4 bits")):
        yield Candidate("train adapters", (f"training.finetune={method}",), price, OTHER_RESULT)


def _shorter_sequences(spec: Spec) -> Iterator[Candidate]:
    length = spec.training.sequence_length
    while length % 2 == 0 and length > 512:
        length //= 2
        yield Candidate(
            "shorter sequences", (f"training.sequence_length={length}",), "less context to learn from", OTHER_RESULT
        )
