"""The specification of a run: fully resolved, validated once, immutable."""

from __future__ import annotations

from pydantic import Field, PrivateAttr

from memcalc.spec.hardware.gpus import GpuSpec, find_gpu
from memcalc.spec.inference import InferenceSpec
from memcalc.spec.model import ConfigBlock, ModelSpec
from memcalc.spec.origin import Origin
from memcalc.spec.training import HardwareSpec, ParallelismSpec, TrainingSpec


class Spec(ConfigBlock):
    """One run: a training step, or generation. All defaults are resolved, so later code assumes none."""

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
    def gpu(self) -> GpuSpec | None:
        """The GPU of the run, or None.

        Raises:
            InputError: the GPU is unknown, as in `find_gpu`.
        """
        return None if self.hardware.gpu is None else find_gpu(self.hardware.gpu)

    def with_training(self, **fields: object) -> Spec:
        """Return the run with other values of fields of `training`; nothing is validated."""
        return self.model_copy(update={"training": self.training.model_copy(update=fields)})

    @property
    def blocks(self) -> tuple[object, ...]:
        """All that decides memory: without the name and the origin."""
        return self.model, self.training, self.parallelism, self.hardware, self.inference

    @property
    def origin(self) -> Origin:
        """Origin of the run: its program, how its file was read, what the file leaves open."""
        return self._origin

    def with_origin(self, origin: Origin) -> Spec:
        """Return the same run with this origin."""
        copy = self.model_copy()
        copy._origin = origin  # noqa: SLF001 -- memcalc's own attribute, on a copy
        return copy
