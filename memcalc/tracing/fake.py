"""The training step on fake tensors: shapes without values, on any machine."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack
from typing import Literal

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memcalc.events.event import Event
from memcalc.recorder.observer import RecordingObserver
from memcalc.recorder.recorder import Recorder
from memcalc.spec.cards import Card
from memcalc.spec.spec import Spec
from memcalc.step.loop import TrainingRun
from memcalc.tracing.cuda_functions import CUDA, CudaFunctions, on_device
from memcalc.tracing.cuda_kernels import CudaKernels

Semantics = Literal["cuda", "cpu"]


def record_fake(
    spec: Spec,
    card: Card,
    steps: int,
    semantics: Semantics = "cuda",
    progress: Callable[[int], None] | None = None,
) -> tuple[TrainingRun, tuple[Event, ...]]:
    """Runs the step on fake tensors.

    Args:
        spec: what to train.
        card: whose workspaces the operators take, for CUDA's semantics.
        steps: optimizer steps.
        semantics: which device's operators run.
        progress: called with the number of events now and then.

    Returns:
        the run, over, and the events.
    """
    gc.collect()  # what earlier runs left behind must not be freed in the middle of this one
    modes = ExitStack()
    if semantics == "cuda":
        run = TrainingRun(spec, CUDA)
        functions = CudaFunctions()
        recorder = Recorder(CudaKernels(card), on_device, progress)
        modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        modes.enter_context(recorder)
        modes.enter_context(functions.entered())
    else:
        run = TrainingRun(spec, torch.device("cpu"))
        recorder = Recorder(progress=progress)
        modes.enter_context(FakeTensorMode())
        modes.enter_context(recorder)
    with modes:
        run.execute(steps, RecordingObserver(run, recorder))
        events = recorder.events()
    return run, events
