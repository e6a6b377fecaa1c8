"""Single changes of a run that may save memory, the cheapest first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from memcalc.spec.optimizers import OPTIMIZERS
from memcalc.spec.spec import Spec

RESULTS = (SAME, MORE_GPUS, OTHER_RESULT) = (
    "same result",
    "same result, more GPUs",
    "another result",
)  # worse and worse


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
    yield from _smaller_micro_batches(spec)
    if training.loss == "materialized":
        yield Candidate("chunked loss", ("training.loss=chunked",), "little time", SAME)
    if training.recompute == "none" and training.attention == "eager":
        yield Candidate("recompute attention", ("training.recompute=selective",), "a little more compute", SAME)
    if training.recompute != "full":
        yield Candidate("recompute all", ("training.recompute=full",), "one more forward: a third more compute", SAME)
    yield from _sharding(spec)
    if training.optimizer in ("adam", "adamw") and not training.optimizer_options.amsgrad:
        overrides = ("training.optimizer=adam-8bit", "training.optimizer_implementation=for-loop")
        yield Candidate("optimizer states in 8 bits", overrides, "rounded moments", OTHER_RESULT)
    yield from _shorter_sequences(spec)


def _smaller_micro_batches(spec: Spec) -> Iterator[Candidate]:
    """Half, a quarter, ... with as much more accumulation, so that a step sees the same sequences."""
    size, steps = spec.training.micro_batch_size, spec.training.gradient_accumulation_steps
    while size % 2 == 0:
        size, steps = size // 2, steps * 2
        overrides = (f"training.micro_batch_size={size}", f"training.gradient_accumulation_steps={steps}")
        yield Candidate("smaller micro-batch", overrides, "smaller matrix products", SAME)


def _sharding(spec: Spec) -> Iterator[Candidate]:
    parallelism = spec.parallelism
    if parallelism.engine == "megatron":
        return  # its sharding is not a stage that can simply be raised
    for stage in range(parallelism.zero_stage + 1, 4):
        if parallelism.data_parallel > 1:
            engine = "fsdp2" if stage == 3 else "deepspeed"
            overrides = (f"parallelism.zero_stage={stage}", f"parallelism.engine={engine}")
            yield Candidate("shard more", overrides, _STAGE_COSTS[stage], SAME)
    if parallelism.zero_stage:
        for factor in (2, 4, 8):
            more = (f"parallelism.data_parallel={parallelism.data_parallel * factor}", *_free_batch(spec))
            yield Candidate("shard over more GPUs", more, f"{factor} times as many GPUs", MORE_GPUS)


_STAGE_COSTS = {1: "weights gathered after each step", 2: "gradients scattered", 3: "weights gathered as they are used"}


def _free_batch(spec: Spec) -> tuple[str, ...]:
    return () if spec.training.global_batch_size is None else ("training.global_batch_size=null",)


def _shorter_sequences(spec: Spec) -> Iterator[Candidate]:
    length = spec.training.sequence_length
    while length % 2 == 0 and length > 512:
        length //= 2
        yield Candidate(
            "shorter sequences", (f"training.sequence_length={length}",), "less context to learn from", OTHER_RESULT
        )
