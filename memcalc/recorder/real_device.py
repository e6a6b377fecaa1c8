"""A run on a real device (CPU, GPU) or the null CUDA device, recorded until it completes or runs out of memory."""

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
from memcalc.recorder.allocator_history import UnobservedHistory, attributed
from memcalc.recorder.history import HistoryRecorder
from memcalc.recorder.observer import ObservedRun, RecordingObserver
from memcalc.recorder.recorder import Recorder
from memcalc.step.loop import Observer
from memcalc.step.quantization import sizes_of

FIRST_OF_A_STEP = "zero_grad"

# Errors of allocations that are not the caching allocator's, which raises OutOfMemoryError.
OUT_OF_MEMORY_MESSAGES = (
    "can't allocate memory",  # the CPU allocator, c10/core/impl/alloc_cpu.cpp
    "CUDA error: out of memory",  # the driver, c10/cuda/CUDAException.cpp
    "CUBLAS_STATUS_ALLOC_FAILED",  # cuBLAS, for its handle: aten/src/ATen/cuda/CublasHandlePool.cpp
    "CUDNN_STATUS_ALLOC_FAILED",
)

Sizes = tuple[int, int, int]


class DeviceRun(ObservedRun, Protocol):
    """A training run."""

    @property
    def device(self) -> torch.device:
        """The device of the run."""

    def execute(self, steps: int, observer: Observer) -> None:
        """Build everything, then train."""


def sizes(run: DeviceRun) -> Sizes:
    """Return the elements of parameters, trained parameters and buffers; zeros before the model is built."""
    return (0, 0, 0) if run.model is None else sizes_of(run.model.module)


class CompletedRun(NamedTuple):
    """Results of a run."""

    events: tuple[Event, ...]
    failed: str | None  # PyTorch's message, if the run ran out of memory
    sizes: Sizes
    seconds: dict[str, float]  # host time: "build", "steps", "again" (a second, instrumented run)


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
    """An observer that measures the time to build and to run; the first phase of a step ends building."""

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
        """Return the seconds of building and of the steps up to now."""
        now = time.perf_counter()
        built = now if self._built is None else self._built
        return {"build": built - self._began, "steps": now - built}


def record_real(make_run: Callable[[], DeviceRun], steps: int, watching: Observer) -> CompletedRun:
    """Run the step on a real device; record every allocation with its component.

    On CUDA the step runs twice, so that the instrumentation does not change the counted bytes: see `unobserved`.

    Args:
        make_run: returns a run that has not been executed.
        steps: optimizer steps.
        watching: an observer of the counted run; it enters phases before the recorder, and leaves them after it.

    Raises:
        InputError: the step cannot run the spec.
    """
    run = make_run()
    if run.device.type != "cuda" or not hasattr(torch._C, "_cuda_setMemoryMetadata"):  # noqa: SLF001 -- torch 2.10
        return record_instrumented(run, steps, watching)
    device = run.device
    history = UnobservedHistory(device)
    watch = Stopwatch()
    died = until_dead(run, steps, Observers([watching, history, watch]))
    events, counted = history.close(), sizes(run)  # close() waits for the device
    seconds, begun = watch.seconds(), time.perf_counter()
    del run
    gc.collect()
    # Libraries keep their workspaces from the first run. The second run must allocate them again to attribute them.
    torch._C._cuda_clearCublasWorkspaces()  # noqa: SLF001 -- no public name
    torch.cuda.empty_cache()
    found = attributed(events, record_instrumented(make_run(), steps).events)
    return CompletedRun(found, died, counted, seconds | {"again": time.perf_counter() - begun})


def record_instrumented(run: DeviceRun, steps: int, *watching: Observer) -> CompletedRun:
    """Run the step once, recorded by a dispatch mode, and on CUDA also by the allocator's history."""
    recorder, watch = _recorder(run.device), Stopwatch()
    with recorder:
        died = until_dead(run, steps, Observers([*watching, watch, RecordingObserver(run, recorder)]))
    return CompletedRun(recorder.events(), died, sizes(run), watch.seconds())


def until_dead(run: DeviceRun, steps: int, observer: Observer) -> str | None:
    """Run the step; return the error message if memory runs out, else None."""
    try:
        run.execute(steps, observer)
    except torch.OutOfMemoryError as error:
        return str(error)
    except RuntimeError as error:
        if not any(message in str(error) for message in OUT_OF_MEMORY_MESSAGES):
            raise
        return str(error)
    return None


def _recorder(device: torch.device) -> Recorder:
    """Return the best recorder for this PyTorch: before 2.10 one without operators' internal blocks."""
    if device.type != "cuda":
        return Recorder(counts=with_memory)
    try:
        return HistoryRecorder(device)
    except Unavailable:
        return Recorder(counts=lambda tensor: tensor.is_cuda)


def on_cpu(tensor: Tensor) -> bool:
    """Return whether a tensor is in host memory; tensors on the meta device are not."""
    return tensor.device.type == "cpu"


def with_memory(tensor: Tensor) -> bool:
    """Return whether a tensor has host memory; DTensor derives global shapes on fake tensors, which have none."""
    return on_cpu(tensor) and not isinstance(tensor, FakeTensor)
