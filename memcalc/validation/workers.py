"""Worker processes that measure on a device, by its name: under this Python, or a CUDA build on the null device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from memcalc.directories import temporary_directory
from memcalc.measuring.client import WORKER, Worker

NULL = "null"


@contextmanager
def worker_for(device: str | None, python: str | None = None) -> Iterator[tuple[Worker, str | None]]:
    """Yield a worker and the device by its name in the worker.

    Args:
        device: "cuda", "cuda:1", "cpu", or "null:<gpu>"; None: the GPU.
        python: for a null device, an interpreter with a CUDA build of torch; None: $MEMCALC_NULL_PYTHON or this one.

    Raises:
        InputError: the GPU is unknown.
        Unavailable: a requirement of the null device is missing.
    """
    kind, _, gpu = (device or "").partition(":")
    if kind != NULL:
        with Worker() as worker:
            yield worker, device
        return
    from memcalc.nullcuda.gpu_description import find_null_gpu
    from memcalc.nullcuda.tracing import interpreter, step_environment
    from memcalc.spec.hardware.gpus import DEFAULT_CARD

    found, program = find_null_gpu(gpu or DEFAULT_CARD), interpreter(python)
    with temporary_directory("memcalc-null-") as folder:
        variables = step_environment(found, found, program, folder)
        with Worker((program, *WORKER), variables) as worker:
            yield worker, "cuda:0"
