"""A run on a device that is there (CPU, GPU, null CUDA device), recorded until it ends or its memory does."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memcalc.errors import Unavailable
from memcalc.events.event import Event
from memcalc.recorder.history import HistoryRecorder
from memcalc.recorder.observer import Observed, RecordingObserver
from memcalc.recorder.recorder import Recorder
from memcalc.recorder.unobserved import UnobservedHistory, attributed
from memcalc.step.loop import Observer

CPU_MESSAGE = "can't allocate memory"  # what the CPU's allocator says, c10/core/impl/alloc_cpu.cpp

Sizes = tuple[int, int, int]


class Run(Observed, Protocol):
    """A training run."""

    @property
    def device(self) -> torch.device:
        """Where it runs."""

    def execute(self, steps: int, observer: Observer) -> None:
        """Builds everything, then trains."""

    def sizes(self) -> Sizes:
        """Parameters, those that are trained, and elements of buffers."""


class Recorded(NamedTuple):
    """What a run left."""

    events: tuple[Event, ...]
    died: str | None  # PyTorch's message, if the memory ran out
    sizes: Sizes


class Observers:
    """Several observers as one: each phase is entered from the first to the last."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """See `memcalc.step.loop.Observer`."""
        with ExitStack() as stack:
            for observer in self._observers:
                stack.enter_context(observer.phase(name))
            yield


def record_real(make_run: Callable[[], Run], steps: int, watching: Observer) -> Recorded:
    """Runs the step on a device that is there; every allocation is recorded, and what it is for.

    On CUDA the step runs twice, so that watching does not change what is counted: see `unobserved`.

    Args:
        make_run: makes a run that was not executed yet.
        steps: optimizer steps.
        watching: an observer of the run that counts, told of phases before and after the recorder.

    Raises:
        InputError: the step cannot run what the spec asks for.
    """
    run = make_run()
    if run.device.type != "cuda" or not hasattr(torch._C, "_cuda_setMemoryMetadata"):  # noqa: SLF001 -- torch 2.10
        return record_watched(run, steps, watching)
    device = run.device
    history = UnobservedHistory(device)
    died = until_dead(run, steps, Observers([watching, history]))
    events, sizes = history.close(), run.sizes()
    del run
    gc.collect()
    torch.cuda.empty_cache()
    return Recorded(attributed(events, record_watched(make_run(), steps).events), died, sizes)


def record_watched(run: Run, steps: int, *watching: Observer) -> Recorded:
    """Runs the step once, watched by PyTorch's dispatcher, and on CUDA by the allocator."""
    recorder = _recorder(run.device)
    with recorder:
        died = until_dead(run, steps, Observers([*watching, RecordingObserver(run, recorder)]))
    return Recorded(recorder.events(), died, run.sizes())


def until_dead(run: Run, steps: int, observer: Observer) -> str | None:
    """Runs the step; the message if the memory runs out."""
    try:
        run.execute(steps, observer)
    except torch.OutOfMemoryError as error:
        return str(error)
    except RuntimeError as error:
        if CPU_MESSAGE not in str(error):
            raise
        return str(error)
    return None


def _recorder(device: torch.device) -> Recorder:
    """The best record that this PyTorch can give: before 2.10 one without what operators take inside."""
    if device.type != "cuda":
        return Recorder(counts=with_memory)
    try:
        return HistoryRecorder(device)
    except Unavailable:
        return Recorder(counts=lambda tensor: tensor.is_cuda)


def on_cpu(tensor: Tensor) -> bool:
    """Whether a tensor has memory of the host: those on the meta device have none."""
    return tensor.device.type == "cpu"


def with_memory(tensor: Tensor) -> bool:
    """The same of a real one: DTensor finds shapes on fake tensors of the whole."""
    return on_cpu(tensor) and not isinstance(tensor, FakeTensor)
