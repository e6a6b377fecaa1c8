"""Recording the step on fake tensors."""

from __future__ import annotations

from memcalc.progress import Progress, silent
from memcalc.recorder.observer import RecordingObserver
from memcalc.recorder.trace import Recording
from memcalc.spec.cards import Card
from memcalc.spec.spec import Spec
from memcalc.step.loop import TrainingRun
from memcalc.tracing.session import fake_cpu, fake_cuda


def record_fake(spec: Spec, card: Card, steps: int, *, cuda: bool = True, progress: Progress = silent) -> Recording:
    """Runs the step on fake tensors.

    Args:
        spec: what to train.
        card: whose workspaces the operators take, with CUDA's semantics.
        steps: optimizer steps.
        cuda: whether operators do what they do on CUDA; else what they do on the CPU.
        progress: told the phase and the number of events so far.
    """
    with fake_cuda(card, progress, spec.parallelism.data_parallel) if cuda else fake_cpu(progress) as session:
        run = TrainingRun(spec, session.device)
        run.execute(steps, RecordingObserver(run, session.recorder))
        events = session.recorder.events()
        parameters, trainable, buffers = run.sizes()
    return Recording(
        device="fake:cuda" if cuda else "fake:cpu",
        events=events,
        parameters=parameters,
        trainable=trainable,
        buffers=buffers,
        readbacks=session.readbacks,
        has_allocator=cuda,
    )
