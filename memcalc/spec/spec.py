"""The specification: what the user asked for, fully resolved, validated once, frozen."""

from __future__ import annotations

from pydantic import Field, PrivateAttr

from memcalc.spec.inference import InferenceSpec
from memcalc.spec.model import Block, ModelSpec
from memcalc.spec.origin import Origin
from memcalc.spec.training import HardwareSpec, ParallelismSpec, TrainingSpec


class Spec(Block):
    """One run: a training step, or generation. Every default is filled in: nothing downstream guesses."""

    name: str = Field("unnamed", description="shown in reports")
    model: ModelSpec
    training: TrainingSpec
    parallelism: ParallelismSpec
    hardware: HardwareSpec
    inference: InferenceSpec | None = Field(
        None, description="generation instead of training; `training` is then its forward pass"
    )

    _origin: Origin = PrivateAttr(Origin())

    @property
    def origin(self) -> Origin:
        """Where the run comes from: its program, how its file was read, what the file leaves open."""
        return self._origin

    def with_origin(self, origin: Origin) -> Spec:
        """The same run, from there."""
        copy = self.model_copy()
        copy._origin = origin  # noqa: SLF001 -- our own, on a copy of ours
        return copy
