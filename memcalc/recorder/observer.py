"""The recorder as an observer of a training run: reports phases, and tensors of known component."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from memcalc.ledger.component import Component
from memcalc.recorder.recorder import Recorder


class Model(Protocol):
    """A model with a module."""

    @property
    def module(self) -> nn.Module:
        """The module with the parameters."""


class ObservedRun(Protocol):
    """A run that reports its tensors."""

    @property
    def model(self) -> Model | None:
        """The trained model; None before it is built."""

    @property
    def engine(self) -> str | None:
        """The engine that shards or replicates it over ranks; None on one rank."""

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer; None before it is built."""

    def tensors_by_component(self) -> dict[Component, list[Tensor]]:
        """Return the tensors of known component, by component."""


class RecordingObserver:
    """Forwards phases and known tensors of a run to the recorder.

    Args:
        run: the recorded run.
        recorder: entered by the caller around the run.
    """

    def __init__(self, run: ObservedRun, recorder: Recorder) -> None:
        self.run = run
        if run.engine is not None:
            recorder.places.track_engines()
        self.recorder = recorder

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """See `memcalc.step.loop.Observer`."""
        self.recorder.begin_phase(name)
        try:
            yield
        finally:
            if name == "model" and self.run.model is not None:
                self.recorder.name_modules(self.run.model.module)
            if name == "optimizer" and self.run.optimizer is not None:
                # Gradients that are upcast for the update only are freed when its phase ends.
                self.run.optimizer.register_step_pre_hook(lambda *_: self._name())
            self._name()
            self.recorder.end_phase()

    def _name(self) -> None:
        for component, tensors in self.run.tensors_by_component().items():
            self.recorder.mark(component, tensors)
