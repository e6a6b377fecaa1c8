"""The recorder as an observer of a training run: phases, and the tensors that the run can name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from memcalc.ledger.component import Component
from memcalc.recorder.recorder import Recorder


class Model(Protocol):
    """Has a module."""

    @property
    def module(self) -> nn.Module:
        """Holds the parameters."""


class Observed(Protocol):
    """A run that tells what it holds."""

    @property
    def model(self) -> Model | None:
        """What is trained; None before it is built."""

    @property
    def engine(self) -> str | None:
        """What spreads it over several ranks; None on one."""

    @property
    def optimizer(self) -> Optimizer | None:
        """What updates it; None before it is built."""

    def held(self) -> dict[Component, list[Tensor]]:
        """The tensors that can be named now."""


class RecordingObserver:
    """Tells the recorder what the run knows.

    Args:
        run: the run that is recorded.
        recorder: entered by the caller around the run.
    """

    def __init__(self, run: Observed, recorder: Recorder) -> None:
        self.run = run
        if run.engine is not None:
            recorder.places.watch_engines()
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
                # Gradients that are widened for the update alone are no more when its phase ends.
                self.run.optimizer.register_step_pre_hook(lambda *_: self._name())
            self._name()
            self.recorder.end_phase()

    def _name(self) -> None:
        for component, tensors in self.run.held().items():
            self.recorder.mark(component, tensors)
