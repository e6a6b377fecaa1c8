"""The specification: what the user asked for, fully resolved, validated once, frozen."""

from __future__ import annotations

from pydantic import Field, PrivateAttr

from memcalc.spec.inference import InferenceSpec
from memcalc.spec.limits import Limit
from memcalc.spec.model import Block, ModelSpec
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

    _notes: tuple[str, ...] = PrivateAttr(())
    _limits: tuple[Limit, ...] = PrivateAttr(())
    _program: str = PrivateAttr("")

    @property
    def notes(self) -> tuple[str, ...]:
        """What was said while it was read, for the reader of a result: how another framework's file was understood."""
        return self._notes

    def with_notes(self, notes: tuple[str, ...]) -> Spec:
        """The same run, with these notes."""
        copy = self.model_copy()
        copy._notes = notes  # noqa: SLF001 -- our own, on a copy of ours
        return copy

    @property
    def limits(self) -> tuple[Limit, ...]:
        """What another framework's file asks for and the estimate does not model."""
        return self._limits

    def with_limits(self, limits: tuple[Limit, ...]) -> Spec:
        """The same run, with these limits."""
        copy = self.model_copy()
        copy._limits = limits  # noqa: SLF001 -- our own, on a copy of ours
        return copy

    @property
    def program(self) -> str:
        """The program and version whose run this is, as a headline names it; "": our own description of a run."""
        return self._program

    def with_program(self, program: str) -> Spec:
        """The same run, named as that of a program."""
        copy = self.model_copy()
        copy._program = program  # noqa: SLF001 -- our own, on a copy of ours
        return copy
