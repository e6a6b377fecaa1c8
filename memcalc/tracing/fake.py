"""Recording a run on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from memcalc.progress import Progress, silent
from memcalc.recorder.observer import Observed, RecordingObserver
from memcalc.recorder.real import Observers
from memcalc.recorder.recording import Recording
from memcalc.spec.cards import Card
from memcalc.step.loop import Observer
from memcalc.tracing.session import Session, fake_cpu, fake_cuda, real_cpu


class Run(Observed, Protocol):
    """A training run that can be recorded."""

    def execute(self, steps: int, observer: Observer) -> None:
        """Builds everything, then trains."""

    def sizes(self) -> tuple[int, int, int]:
        """Parameters, those that are trained, and elements of buffers."""


def record_fake(
    make_run: Callable[[torch.device], Run],
    card: Card,
    steps: int,
    *,
    cuda: bool = True,
    ranks: int = 1,
    progress: Progress = silent,
) -> Recording:
    """Runs the step on fake tensors.

    Args:
        make_run: the run, on a device.
        card: whose workspaces the operators take, with CUDA's semantics.
        steps: optimizer steps.
        cuda: whether operators do what they do on CUDA; else what they do on the CPU.
        ranks: of how many this is the first; the others are not there. With the CPU's semantics its own tensors are:
            DeviceMesh and DDP's buckets read values.
        progress: told the phase and the number of events so far.
    """
    with _session(card, progress, ranks, cuda=cuda) as session:
        run = make_run(session.device)
        building = _Building(session)
        run.execute(steps, Observers([RecordingObserver(run, session.recorder), building]))
        events, host_events = session.recorder.events(), session.recorder.host_events()
        parameters, trainable, buffers = run.sizes()
    return Recording(
        device="fake:cuda" if cuda else "fake:cpu",
        events=events,
        parameters=parameters,
        trainable=trainable,
        buffers=buffers,
        readbacks=session.readbacks - building.readbacks,
        has_allocator=cuda,
        host_events=host_events,
        notes=getattr(run, "notes", ()),
    )


class _Building:
    """An observer that counts values read while the model is built: random weights need some, a checkpoint none."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.readbacks = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """See `memcalc.step.loop.Observer`."""
        yield
        if name == "model":
            self.readbacks = self._session.readbacks


def _session(card: Card, progress: Progress, ranks: int, *, cuda: bool) -> AbstractContextManager[Session]:
    if cuda:
        return fake_cuda(card, progress, ranks)
    return real_cpu(progress, ranks) if ranks > 1 else fake_cpu(progress)
