"""The specification: what the user asked for, fully resolved, validated once, frozen."""

from __future__ import annotations

from pydantic import Field

from memcalc.spec.model import Block, ModelSpec
from memcalc.spec.training import HardwareSpec, ParallelismSpec, TrainingSpec


class Spec(Block):
    """One training run. Every default is filled in: nothing downstream guesses."""

    name: str = Field("unnamed", description="shown in reports")
    model: ModelSpec
    training: TrainingSpec
    parallelism: ParallelismSpec
    hardware: HardwareSpec
