"""A run on a device that is there (CPU, GPU, null CUDA device), recorded until it ends or its memory does."""

from __future__ import annotations

import gc
import time
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

FIRST_OF_A_STEP = "zero_grad"

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
    seconds: dict[str, float]  # of the host: "build" up to the first step, "steps", "again" watched, where it ran twice


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


class Stopwatch:
    """An observer that knows when building was over: when the first phase of a step began."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._built: float | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """See `memcalc.step.loop.Observer`."""
        if self._built is None and name.startswith(FIRST_OF_A_STEP):
            self._built = time.perf_counter()
        yield

    def seconds(self) -> dict[str, float]:
        """Up to now."""
        now = time.perf_counter()
        built = now if self._built is None else self._built
        return {"build": built - self._began, "steps": now - built}


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
    watch = Stopwatch()
    died = until_dead(run, steps, Observers([watching, history, watch]))
    events, sizes = history.close(), run.sizes()  # waits for the device
    seconds, begun = watch.seconds(), time.perf_counter()
    del run
    gc.collect()
    # Libraries keep their workspaces from the first run on: the second is to take them, too, or it could not name them.
    torch._C._cuda_clearCublasWorkspaces()  # noqa: SLF001 -- no public name
    torch.cuda.empty_cache()
    found = attributed(events, record_watched(make_run(), steps).events)
    return Recorded(found, died, sizes, seconds | {"again": time.perf_counter() - begun})


def record_watched(run: Run, steps: int, *watching: Observer) -> Recorded:
    """Runs the step once, watched by PyTorch's dispatcher, and on CUDA by the allocator."""
    recorder, watch = _recorder(run.device), Stopwatch()
    with recorder:
        died = until_dead(run, steps, Observers([*watching, watch, RecordingObserver(run, recorder)]))
    return Recorded(recorder.events(), died, run.sizes(), watch.seconds())


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
