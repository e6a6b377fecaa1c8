"""One run in this process: the step, the recorder, and the device's counters."""

from __future__ import annotations

import gc
import os
import time
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from memcalc.errors import MemcalcError, NotWritten, Unavailable
from memcalc.events import write_events
from memcalc.measuring.counters import CpuCounters, CudaCounters, RecorderCounters
from memcalc.measuring.devices import (
    NULL_CARD,
    View,
    allocator_settings,
    describe_device,
    find_device,
    look,
    software,
    used_by_all,
)
from memcalc.measuring.job import Job
from memcalc.measuring.measurement import DONE, OUT_OF_MEMORY, MeasuredDevice
from memcalc.recorder.real_device import record_real
from memcalc.step.loop import TrainingRun
from memcalc.units import format_bytes

Counters = CudaCounters | CpuCounters | RecorderCounters


def answer(job: Job) -> dict[str, Any]:
    """Return the figures of a job's run, or why there are none. The events are in the job's file."""
    try:
        return perform(job)
    except MemcalcError as error:
        return {"refused": [type(error).__name__, str(error)]}


def describe(name: str | None) -> dict[str, Any]:
    """Return a device and the versions of its software, by which its records are identified."""
    try:
        return {"device": asdict(describe_found_device(name)), "versions": software()}
    except MemcalcError as error:
        return {"refused": [type(error).__name__, str(error)]}


def describe_found_device(name: str | None) -> MeasuredDevice:
    """Return the description of a device.

    Raises:
        Unavailable: there is no such device.
    """
    target = find_device(name)
    if target.type == "cuda":
        begin_on(target)
    return describe_device(target)


def perform(job: Job) -> dict[str, Any]:
    """Run the job, and return the device, the figures by phase and the outcome.

    Raises:
        Unavailable: there is no such device, or it is busy.
        InputError: the step cannot run the spec.
    """
    began = time.perf_counter()
    own = "" if job.device == "cpu" else job.spec.training.alloc_conf
    if settings := job.alloc_conf or own:
        set_allocator(settings)
    target = find_device(job.device)
    device, counters = _prepared(target, job)
    gc.collect()
    ready = time.perf_counter()
    with counters.recording():
        recorded = record_real(partial(TrainingRun, job.spec, target), job.steps, counters)
    if isinstance(counters, RecorderCounters):
        counters.hear(recorded.events)
    try:
        write_events(job.events, recorded.events)
        unwritten = {}
    except (NotWritten, OSError):  # if the disk is full, the events are sent with the answer
        unwritten = {"events": recorded.events}
    parameters, trainable, buffers = recorded.sizes
    return unwritten | {
        "device": asdict(device),
        "versions": software(),
        "allocator": allocator_settings(),
        "phases": [asdict(phase) for phase in counters.phases],
        "parameters": parameters,
        "trainable": trainable,
        "buffers": buffers,
        "outcome": DONE if recorded.failed is None else OUT_OF_MEMORY,
        "message": recorded.failed,
        "seconds": {"device": ready - began, **recorded.seconds, "all": time.perf_counter() - began},
    }


def set_allocator(settings: str) -> None:
    """Configure the caching allocator before any allocation; the environment alone has no effect on a forked process.

    Raises:
        Unavailable: PyTorch rejects the settings.
    """
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = settings
    os.environ.pop("PYTORCH_ALLOC_CONF", None)
    try:
        newer = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # noqa: SLF001 -- no public name
        (newer or torch.cuda.memory._set_allocator_settings)(settings)  # noqa: SLF001 -- the same, up to torch 2.9
    except (RuntimeError, ValueError) as error:
        raise Unavailable(
            f"PyTorch rejects PYTORCH_CUDA_ALLOC_CONF={settings}: {str(error).splitlines()[0]}"
        ) from error


def _prepared(target: torch.device, job: Job) -> tuple[MeasuredDevice, Counters]:
    """Return the device with its context created and no other work on it, and the counters to use."""
    if target.type == "cpu":
        return describe_device(target), RecorderCounters() if dist.is_initialized() else CpuCounters()
    before = look(target, os.getpid())
    if before is not None and NULL_CARD in os.environ:
        before = before._replace(used_bytes=0, other_pids=())  # a null device has no other processes
    if not job.force:
        refuse_busy(target, before)
    begin_on(target)
    torch.cuda.set_device(target)
    source, used = used_by_all(target)
    with_context = used()
    others = 0 if before is None else before.used_bytes
    device = describe_device(target, before, with_context - others)
    if not job.force:
        _refuse_small(job, device, with_context)
    return replace(device, source=source), CudaCounters(target, lambda: used() - others)


def begin_on(target: torch.device) -> None:
    """Create the CUDA context.

    Raises:
        Unavailable: the driver rejects it; the message has the reason.
    """
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.mem_get_info(target)
    except RuntimeError as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise Unavailable(f"{target} cannot be used: {reason}. See `nvidia-smi`.") from error


def refuse_busy(target: torch.device, view: View | None) -> None:
    """Reject a busy device: other processes' memory would be measured too, or leave too little.

    Raises:
        Unavailable: another process computes on the device.
    """
    if view is None or not view.busy:
        return
    whose = f", process {', '.join(map(str, view.other_pids))}" if view.other_pids else ""
    raise Unavailable(
        f"{target} is in use ({format_bytes(view.used_bytes, 'GiB')}{whose}). "
        "Wait, choose another GPU with --device cuda:1, or share it with --force."
    )


def _refuse_small(job: Job, device: MeasuredDevice, used: int) -> None:
    free = (device.total_bytes or 0) - used
    if job.weight_bytes > free:
        raise Unavailable(
            f"{device.identifier} has {format_bytes(free, 'GiB')} free; weights and optimizer alone need "
            f"{format_bytes(job.weight_bytes, 'GiB')}. Use a larger GPU, shard the run, or override with --force."
        )
