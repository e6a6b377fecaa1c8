"""The verb `measure`: run the training step on a real device and keep what it held."""

from __future__ import annotations

import gc
import importlib.util
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from memcalc.errors import OutOfMemory, Unavailable
from memcalc.measuring.measurement import DONE, OUT_OF_MEMORY, Measurement
from memcalc.spec.spec import Spec

if TYPE_CHECKING:
    from memcalc.measuring.cpu import CpuObserver
    from memcalc.measuring.cuda import CudaObserver
    from memcalc.step.loop import TrainingRun


def measure(
    spec: Spec,
    device: str | None = None,
    steps: int = 3,
    record: str | Path | None = None,
    *,
    command: str | None = None,
) -> Measurement:
    """What a device really holds, phase by phase, while it runs `steps` training steps.

    Args:
        spec: what to train.
        device: "cuda", "cuda:1" or "cpu"; None: the GPU.
        steps: optimizer steps. The first one makes the optimizer's states; the second is already the steady state.
        record: a file that the figures are appended to, out of memory or not.
        command: what to note as the command; None: that of this process.

    Raises:
        Unavailable: torch, transformers or a GPU is missing.
        InputError: the step cannot run what the spec asks for, or the device has no kernel for it.
        OutOfMemory: the device had too little. The record up to that point has been kept.
    """
    _require(spec)
    # Imported here, so that the package and its errors are there without torch.
    from memcalc.measuring.devices import allocator_settings, describe_device, find_device, software
    from memcalc.step.loop import TrainingRun
    from memcalc.step.quantised import elements

    target = find_device(device)
    gc.collect()  # what earlier runs left behind must not be freed in the middle of this one
    run = TrainingRun(spec, target)
    observer = _observer(run)
    failure = _execute(run, observer, steps)
    module = run.model.module if run.model is not None else None
    measurement = Measurement(
        spec=spec,
        device=describe_device(target),
        versions=software(),
        allocator=allocator_settings(),
        command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]) if command is None else command,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        phases=observer.phases,
        parameters=0 if module is None else sum(elements(p) for p in module.parameters()),
        buffers=0 if module is None else sum(b.numel() for b in module.buffers()),
        outcome=DONE if failure is None else OUT_OF_MEMORY,
    )
    if record is not None:
        from memcalc.measuring.records import append

        append(measurement, Path(record))
    if failure is not None:
        kept = "" if record is None else f" The record up to that point is in {record}."
        raise OutOfMemory(f"{spec.name} ran out of memory in {observer.phases[-1].name}: {failure}{kept}")
    return measurement


def _require(spec: Spec) -> None:
    if importlib.util.find_spec("torch") is None:
        raise Unavailable("measure runs the training step in PyTorch: pip install 'llm-memcalc[torch]'")
    if spec.training.implementation == "huggingface" and importlib.util.find_spec("transformers") is None:
        raise Unavailable("implementation = huggingface runs transformers' modules: pip install 'llm-memcalc[hf]'")


def _observer(run: TrainingRun) -> CudaObserver | CpuObserver:
    if run.device.type == "cuda":
        from memcalc.measuring.cuda import CudaObserver

        return CudaObserver(run)
    from memcalc.measuring.cpu import CpuObserver

    return CpuObserver(run)


def _execute(run: TrainingRun, observer: CudaObserver | CpuObserver, steps: int) -> str | None:
    """Run; the first line of the message if memory ran out."""
    import torch

    try:
        with observer.watching():
            run.execute(steps, observer)
    except torch.OutOfMemoryError as error:
        return str(error).partition("\n")[0]
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):  # what the CPU's allocator says
            raise
        return str(error).partition("\n")[0]
    return None
