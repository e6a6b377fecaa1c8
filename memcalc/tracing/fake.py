"""Recording of a run on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from memcalc.progress import Progress, silent
from memcalc.recorder.observer import RecordingObserver
from memcalc.recorder.real_device import DeviceRun, Observers, sizes
from memcalc.recorder.recording import Recording
from memcalc.spec.hardware.gpus import GpuSpec
from memcalc.tracing.session import Session, fake_cpu, fake_cuda, real_cpu


def record_fake(
    make_run: Callable[[torch.device], DeviceRun],
    gpu: GpuSpec,
    steps: int,
    *,
    cuda: bool = True,
    ranks: int = 1,
    progress: Progress = silent,
) -> Recording:
    """Run the step on fake tensors, and return its recording.

    Args:
        make_run: returns the run on a device.
        gpu: the GPU of CUDA's semantics, which decides workspaces.
        steps: optimizer steps.
        cuda: emulate CUDA kernels; else CPU kernels.
        ranks: number of ranks; this process is the first, and the others do not exist. With CPU semantics and several
            ranks, tensors are real: DeviceMesh and DDP's buckets read values.
        progress: called with the phase and the number of events so far.
    """
    with _session(gpu, progress, ranks, cuda=cuda) as session:
        run = make_run(session.device)
        building = _Building(session)
        run.execute(steps, Observers([RecordingObserver(run, session.recorder), building]))
        events, host_events = session.recorder.events(), session.recorder.host_events()
        parameters, trainable, buffers = sizes(run)
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
    """Observer that counts values read while the model is built: random weights need some, a checkpoint none."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.readbacks = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """See `memcalc.step.loop.Observer`."""
        yield
        if name == "model":
            self.readbacks = self._session.readbacks


def _session(gpu: GpuSpec, progress: Progress, ranks: int, *, cuda: bool) -> AbstractContextManager[Session]:
    if cuda:
        return fake_cuda(gpu, progress, ranks)
    return real_cpu(progress, ranks) if ranks > 1 else fake_cpu(progress)
