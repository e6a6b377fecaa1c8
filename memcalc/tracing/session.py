"""A device that is not there, for any code: fake tensors that are recorded."""

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
from memcalc.recorder.real import on_cpu, with_memory
from memcalc.recorder.recorder import Recorder
from memcalc.spec.cards import Card
from memcalc.spec.kernels import capability
from memcalc.tracing.cuda_functions import CUDA, CudaFunctions, on_device
from memcalc.tracing.cuda_kernels import CudaKernels
from memcalc.tracing.fake_kernels import FakeKernels
from memcalc.tracing.readbacks import Readbacks
from memcalc.tracing.streams import Streams


@dataclass(frozen=True)
class Session:
    """What is recorded, and on what.

    Args:
        device: to name where tensors go.
        recorder: of all that happens inside.
        functions: what Python calls do; None on a device that exists.
    """

    device: torch.device
    recorder: Recorder
    functions: CudaFunctions | Readbacks | None

    @property
    def readbacks(self) -> int:
        """How often a value was asked for that does not exist."""
        kernels = self.recorder.kernels
        inside = kernels.readbacks if isinstance(kernels, FakeKernels) else 0
        return inside + (0 if self.functions is None else self.functions.readbacks)


@contextmanager
def fake_cuda(card: Card, progress: Progress = silent, world_size: int = 1) -> Iterator[Session]:
    """A CUDA device: tensors on "cuda" are fake, those on "cpu" real and not recorded.

    Args:
        card: whose workspaces the operators take.
        progress: told the phase and the number of events so far.
        world_size: of how many ranks this process is the first; the others are not there.
    """
    gc.collect()  # what earlier runs left behind must not be freed in the middle of this one
    with ExitStack() as ranks:
        streams = None
        if world_size > 1:
            from memcalc.tracing.ranks import fake_ranks, fake_streams, split_tensors, unseen_propagation

            ranks.enter_context(fake_ranks(world_size))
            ranks.enter_context(unseen_propagation())
            ranks.enter_context(split_tensors())
            streams = ranks.enter_context(fake_streams())
        yield ranks.enter_context(_cuda(card, progress, streams))


@contextmanager
def _cuda(card: Card, progress: Progress, streams: Streams | None) -> Iterator[Session]:
    kernels = CudaKernels(card, streams, lambda: functions.placing)
    functions = CudaFunctions(capability(card), kernels.values)
    recorder = Recorder(kernels, on_device, progress, functions.host.memory)
    with (
        mock.patch.object(torch.cuda, "empty_cache", recorder.empty_cache),
        mock.patch.object(torch.cuda, "synchronize", return_value=None),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=capability(card)),
        _without_validation(),
        _copied_in_place(),
        FakeTensorMode(allow_non_fake_inputs=True),
        recorder,
        functions.entered(),
    ):
        yield Session(CUDA, recorder, functions)


@contextmanager
def fake_cpu(progress: Progress = silent) -> Iterator[Session]:
    """The CPU: every tensor is fake and recorded, without blocks and workspaces."""
    gc.collect()
    recorder = Recorder(FakeKernels(), on_cpu, progress)
    functions = Readbacks()
    with _without_validation(), _copied_in_place(), FakeTensorMode(allow_non_fake_inputs=True), recorder, functions:
        yield Session(torch.device("cpu"), recorder, functions)


def _without_validation() -> AbstractContextManager[object]:
    """Inside, distributions do not look whether their parameters, which have no values, are valid."""
    return mock.patch.object(Distribution, "_validate_args", new=False)


@contextmanager
def _copied_in_place() -> Iterator[None]:
    """Inside, the copy of a module is on the same device: PyTorch copies the mode of its tensors, too.

    On its way to a clone it asks for their address, and warns of that (torch 2.13, _tensor.py, __deepcopy__).
    """
    with (
        mock.patch.object(FakeTensorMode, "__deepcopy__", lambda mode, _: mode, create=True),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        yield


@contextmanager
def real_cpu(progress: Progress = silent, world_size: int = 1) -> Iterator[Session]:
    """The CPU as it is: what `fake_cpu` is checked against; of several ranks the first, the others are not there."""
    gc.collect()
    with ExitStack() as stack:
        if world_size > 1:
            from memcalc.tracing.ranks import fake_ranks

            stack.enter_context(fake_ranks(world_size))
        recorder = stack.enter_context(Recorder(counts=with_memory, progress=progress))
        yield Session(torch.device("cpu"), recorder, None)
