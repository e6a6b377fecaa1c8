"""Recording the step on fake tensors."""

from __future__ import annotations

import gc
from contextlib import ExitStack

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memcalc.progress import Progress, silent
from memcalc.recorder.observer import RecordingObserver
from memcalc.recorder.recorder import Recorder
from memcalc.recorder.trace import Recording
from memcalc.spec.cards import Card
from memcalc.spec.spec import Spec
from memcalc.step.loop import TrainingRun
from memcalc.tracing.cuda_functions import CUDA, CudaFunctions, on_device
from memcalc.tracing.cuda_kernels import CudaKernels


def record_fake(spec: Spec, card: Card, steps: int, *, cuda: bool = True, progress: Progress = silent) -> Recording:
    """Runs the step on fake tensors.

    Args:
        spec: what to train.
        card: whose workspaces the operators take, with CUDA's semantics.
        steps: optimizer steps.
        cuda: whether operators do what they do on CUDA; else what they do on the CPU.
        progress: told the phase and the number of events so far.
    """
    gc.collect()  # what earlier runs left behind must not be freed in the middle of this one
    run = TrainingRun(spec, CUDA if cuda else torch.device("cpu"))
    functions = CudaFunctions() if cuda else None
    recorder = Recorder(CudaKernels(card), on_device, progress) if cuda else Recorder(progress=progress)
    with ExitStack() as modes:
        modes.enter_context(FakeTensorMode(allow_non_fake_inputs=cuda))
        modes.enter_context(recorder)
        if functions is not None:
            modes.enter_context(functions.entered())
        run.execute(steps, RecordingObserver(run, recorder))
        events = recorder.events()
        parameters, trainable, buffers = run.sizes()
    return Recording(
        device="fake:cuda" if cuda else "fake:cpu",
        events=events,
        parameters=parameters,
        trainable=trainable,
        buffers=buffers,
        readbacks=0 if functions is None else functions.readbacks,
        has_allocator=cuda,
    )
