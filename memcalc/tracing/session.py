"""Emulated devices for any code: fake tensors, recorded."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributions import Distribution

from memcalc.progress import Progress, silent
from memcalc.recorder.real_device import on_cpu, with_memory
from memcalc.recorder.recorder import Recorder
from memcalc.spec.hardware.gpus import GpuSpec
from memcalc.spec.hardware.kernels import capability
from memcalc.tracing.cuda_functions import CUDA, CudaFunctions, on_device
from memcalc.tracing.cuda_kernels import CudaKernels, FakeKernels
from memcalc.tracing.device_reads import DeviceReads
from memcalc.tracing.streams import Streams


@dataclass(frozen=True)
class Session:
    """A recording and its device."""

    device: torch.device  # the device to create tensors on
    recorder: Recorder  # records everything inside the session
    functions: CudaFunctions | DeviceReads | None  # the mode for Python functions; None on a real device

    @property
    def readbacks(self) -> int:
        """Number of reads of data-dependent values."""
        kernels = self.recorder.kernels
        inside = kernels.readbacks if isinstance(kernels, FakeKernels) else 0
        return inside + (0 if self.functions is None else self.functions.readbacks)


@contextmanager
def fake_cuda(gpu: GpuSpec, progress: Progress = silent, world_size: int = 1) -> Iterator[Session]:
    """Emulate a CUDA device: tensors on "cuda" are fake; those on "cpu" are real and not recorded.

    Args:
        gpu: the GPU, which decides workspaces.
        progress: called with the phase and the number of events so far.
        world_size: number of ranks; this process is the first, and the others do not exist.
    """
    gc.collect()  # otherwise garbage of earlier runs would be freed during this one
    with ExitStack() as ranks:
        streams = None
        if world_size > 1:
            from memcalc.tracing.ranks import fake_ranks, fake_streams, split_tensors, unseen_propagation

            ranks.enter_context(fake_ranks(world_size))
            ranks.enter_context(unseen_propagation())
            ranks.enter_context(split_tensors())
            streams = ranks.enter_context(fake_streams())
        yield ranks.enter_context(_cuda(gpu, progress, streams))


@contextmanager
def _cuda(gpu: GpuSpec, progress: Progress, streams: Streams | None) -> Iterator[Session]:
    kernels = CudaKernels(gpu, streams, lambda: functions.placing)
    functions = CudaFunctions(capability(gpu), kernels.values)
    recorder = Recorder(kernels, on_device, progress, functions.host.memory)
    with (
        mock.patch.object(torch.cuda, "empty_cache", recorder.empty_cache),
        mock.patch.object(torch.cuda, "synchronize", return_value=None),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=capability(gpu)),
        _without_validation(),
        _copied_in_place(),
        FakeTensorMode(allow_non_fake_inputs=True),
        recorder,
        functions.entered(),
    ):
        yield Session(CUDA, recorder, functions)


@contextmanager
def fake_cpu(progress: Progress = silent) -> Iterator[Session]:
    """Emulate the CPU: every tensor is fake and recorded, without block rounding and workspaces."""
    gc.collect()
    recorder = Recorder(FakeKernels(), on_cpu, progress)
    functions = DeviceReads()
    with _without_validation(), _copied_in_place(), FakeTensorMode(allow_non_fake_inputs=True), recorder, functions:
        yield Session(torch.device("cpu"), recorder, functions)


def _without_validation() -> AbstractContextManager[object]:
    """Disable the validation of distributions' parameters, which have no values."""
    return mock.patch.object(Distribution, "_validate_args", new=False)


@contextmanager
def _copied_in_place() -> Iterator[None]:
    """Make deep copies of modules keep the same fake mode, which PyTorch would copy too.

    A clone reads the tensors' address, which raises a warning (torch 2.13, _tensor.py, __deepcopy__).
    """
    with (
        mock.patch.object(FakeTensorMode, "__deepcopy__", lambda mode, _: mode, create=True),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        yield


@contextmanager
def real_cpu(progress: Progress = silent, world_size: int = 1) -> Iterator[Session]:
    """Record on the real CPU, to check `fake_cpu`; with several ranks, as the first one."""
    gc.collect()
    with ExitStack() as stack:
        if world_size > 1:
            from memcalc.tracing.ranks import fake_ranks

            stack.enter_context(fake_ranks(world_size))
        recorder = stack.enter_context(Recorder(counts=with_memory, progress=progress))
        yield Session(torch.device("cpu"), recorder, None)
