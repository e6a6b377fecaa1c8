"""The command `trace` on the null device: the step in a child process, with PyTorch's CUDA build and real allocator."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from memcalc.directories import compiler_cache, temporary_directory
from memcalc.errors import InputError, Unavailable
from memcalc.events import read_events
from memcalc.files import write_text
from memcalc.nullcuda.gpu_description import find_null_gpu, properties
from memcalc.nullcuda.launcher import environment
from memcalc.progress import Progress, silent
from memcalc.recorder.recording import Recording
from memcalc.recorder.trace import Trace, make_trace
from memcalc.spec.hardware.gpus import DEFAULT_CARD, GpuSpec
from memcalc.spec.spec import Spec

PYTHON = "MEMCALC_NULL_PYTHON"  # environment variable: the interpreter with a CUDA build of torch

# Memory of a GPU on which no run fails: shows what a run that does not fit would need.
BOUNDLESS = 2**42

PACKAGE = Path(__file__).parents[1]


def trace(
    spec: Spec,
    steps: int = 3,
    alloc_conf: str = "",
    python: str | None = None,
    progress: Progress = silent,
    inputs: str | None = None,
) -> Trace:
    """Run the training step on an emulated GPU, and return its trace.

    Args:
        spec: the run; the GPU is the spec's, or an A100 80 GB.
        steps: optimizer steps.
        alloc_conf: PYTORCH_CUDA_ALLOC_CONF of the run.
        python: an interpreter with a CUDA build of torch; None: $MEMCALC_NULL_PYTHON, else this one.
        progress: called with the progress of the replay.
        inputs: "file.py:name" of a function that makes the arguments of the model's forward; None: made from the spec.

    Raises:
        InputError: the GPU is unknown, or the step cannot run the spec.
        Unavailable: a requirement of the null device is missing.
    """
    gpu, alloc_conf = find_null_gpu(spec.hardware.gpu or DEFAULT_CARD), alloc_conf or spec.training.alloc_conf
    python = interpreter(python)
    report, recording = _record(spec, gpu, gpu, steps, alloc_conf, python, inputs)
    died = report.get("died")
    if died is not None:  # run again on a GPU with enough memory, to see what the step needs
        boundless = dataclasses.replace(gpu, usable_bytes=BOUNDLESS)
        report, recording = _record(spec, gpu, boundless, steps, alloc_conf, python, inputs)
        recording = dataclasses.replace(recording, died=died, allocated_bytes=None, reserved_bytes=None)
    return make_trace(spec, recording, alloc_conf, report["torch"], progress)


def _record(
    spec: Spec, gpu: GpuSpec, memory_of: GpuSpec, steps: int, alloc_conf: str, python: str, inputs: str | None
) -> tuple[dict[str, Any], Recording]:
    """Run the step in a child process, and return its report and its recording."""
    with temporary_directory("memcalc-trace-") as folder:
        write_text(folder / "spec.json", json.dumps(spec.model_dump(mode="json")))
        variables = step_environment(gpu, memory_of, python, folder)
        variables["PYTORCH_CUDA_ALLOC_CONF"] = variables["PYTORCH_ALLOC_CONF"] = alloc_conf
        files = [str(folder / name) for name in ("spec.json", "events.jsonl", "report.json")]
        command = [python, "-P", "-m", "memcalc.nullcuda.traced_step", *files, str(steps)]
        command += [] if inputs is None else [inputs]
        done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)  # noqa: S603 -- the user's own interpreter
        report = _report(Path(files[2]), done)
        parameters, trainable, buffers = report["sizes"]
        recording = Recording(
            device=f"null:{gpu.name}",
            events=tuple(read_events(files[1])),
            parameters=parameters,
            trainable=trainable,
            buffers=buffers,
            allocated_bytes=report["peak_allocated"],
            reserved_bytes=report["peak_reserved"],
            notes=tuple(report["notes"]),
        )
    return report, recording


def step_environment(gpu: GpuSpec, memory_of: GpuSpec, python: str, folder: Path) -> dict[str, str]:
    """Return variables for a process of another interpreter that runs memcalc's step on an emulated GPU.

    Args:
        gpu: the GPU.
        memory_of: the GPU that sets the memory size.
        python: an interpreter with a CUDA build of torch.
        folder: directory for a search path; it must exist as long as the process.
    """
    # Only memcalc's own package: the directory that contains it may also have a CPU build of torch.
    (folder / "path").mkdir()
    (folder / "path" / "memcalc").symlink_to(PACKAGE, target_is_directory=True)
    variables = environment(gpu.name, 1, pythons=(python,), skip_init=True)
    variables["PYTHONPATH"] = os.pathsep.join((str(folder / "path"), variables["PYTHONPATH"]))
    variables["MEMCALC_NULL_PROPERTIES"] = properties(memory_of, 1)
    return variables | compiler_cache(folder)


def interpreter(python: str | None = None) -> str:
    """Return the interpreter with a CUDA build of torch: the named one, else $MEMCALC_NULL_PYTHON, else this one."""
    return python or os.environ.get(PYTHON) or sys.executable


def _report(file: Path, done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the child's report.

    Raises:
        InputError: the child rejected the spec.
        Unavailable: a requirement of the child is missing.
    """
    try:
        report: dict[str, Any] = json.loads(file.read_bytes())
    except (OSError, ValueError):  # missing or truncated: the disk is full
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise Unavailable(
            f"the step ended with exit code {done.returncode} on the null device: "
            f"{lines[-1] if lines else 'no message'}\n"
            f"It was run by {done.args[0]}, which needs torch, pydantic and pyyaml (huggingface: transformers)."
        ) from None
    if "refused" in report:
        kind, message = report["refused"][:2]
        raise Unavailable(message) if kind in ("Unavailable", "NotWritten") else InputError(message)
    return report
