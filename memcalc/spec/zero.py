"""DeepSpeed's zero_optimization block: the sizes of its buffers, and what its releases copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from memcalc.spec.model import ConfigBlock, Count, Size

if TYPE_CHECKING:
    from memcalc.spec.spec import Spec

AutomaticSize = Literal["prefetch_bucket_size", "param_persistence_threshold"]


FULLY_SHARDED = 3  # the ZeRO stage that shards weights: FSDP's FULL_SHARD, or reshard_after_forward=True


class ZeroSpec(ConfigBlock):
    """Sizes in elements, with the defaults of DeepSpeed's runtime/zero/config.py."""

    reduce_bucket_size: Size = Field(500_000_000, description="elements of the gradient reduce bucket")
    prefetch_bucket_size: Count = Field(50_000_000, description="stage 3: elements of parameters that are prefetched")
    param_persistence_threshold: Count = Field(
        100_000, description="stage 3: parameters with at most this many elements stay gathered"
    )
    overlap_comm: bool | None = Field(
        None, description="whether gradients are reduced on a CUDA stream of their own; default: at stage 3 only"
    )
    separate_no_decay: bool = Field(
        False, description="whether norms and biases, which have no weight decay, are a parameter group of their own"
    )
    copies_fp32_weights: bool = Field(
        False, description="stage 3: whether the optimizer updates a copy of weights that are fp32 (DeepSpeed 0.19)"
    )
    casts_fp32_weights: bool = Field(
        False,
        description="stage 3: whether modules are constructed in fp32, and cast to 16 bits before sharding",
    )

    automatic: Annotated[tuple[AutomaticSize, ...], Field(strict=False)] = Field(
        (),
        description="stage 3: sizes that are computed when training begins, after the engine of a reference model was "
        "made, which has the defaults (TRL)",
    )
    bf16_optimizer: bool = Field(
        False,
        description="stage 1: true asserts that BF16_Optimizer updates bf16 weights, as it does with recipe mixed-20: "
        "each rank sums all gradients in a second copy of them (gradient_dtype; default: fp32)",
    )
    own_adam: bool = Field(
        False, description="stage 0: whether 16-bit weights are updated by DeepSpeed's own Adam, which flattens them"
    )

    def overlaps(self, stage: int) -> bool:
        """Return whether reductions overlap with backward at a stage (runtime/zero/config.py, overlap_comm_valid)."""
        return stage == 3 if self.overlap_comm is None else self.overlap_comm

    def of_reference(self) -> ZeroSpec:
        """Return the sizes of a reference model's engine."""
        return self.model_copy(update={name: getattr(DEFAULT, name) for name in self.automatic})

    @property
    def is_default(self) -> bool:
        """Whether nothing is set."""
        return self == DEFAULT


DEFAULT = ZeroSpec()


def bf16_optimizer_fields(spec: Spec) -> dict[tuple[str, str], tuple[object, object]]:
    """Return the fields that decide whether DeepSpeed runs its BF16_Optimizer: the value of each, and the one it needs.

    It does at stage 1 if gradients of bf16 weights are summed in fp32 (DeepSpeed 0.19 runtime/engine.py,
    _do_optimizer_sanity_check), and in the pipeline engine without ZeRO, which has the states of stage 1.
    """
    training, parallelism = spec.training, spec.parallelism
    return {
        ("parallelism", "engine"): (parallelism.engine, "deepspeed"),
        ("parallelism", "zero_stage"): (parallelism.zero_stage, 1),
        ("parallelism", "offload"): (parallelism.offload, "none"),
        ("training", "dtype"): (training.dtype, "bf16"),
        ("training", "recipe"): (training.recipe, "mixed-20"),
    }


def runs_bf16_optimizer(spec: Spec) -> bool:
    """Return whether DeepSpeed runs its BF16_Optimizer."""
    return all(value == needed for value, needed in bf16_optimizer_fields(spec).values())
