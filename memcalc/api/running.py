"""Run a step without a GPU, or replay its allocations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, overload

from memcalc.api.sources import Source, load, load_to_run
from memcalc.progress import Progress, silent
from memcalc.spec.rule_sets.inference import of_training

if TYPE_CHECKING:
    from typing import Unpack

    from memcalc.api.trace_result import TracedModule, TracedRun
    from memcalc.nullcuda.options import Options
    from memcalc.nullcuda.result import DryRun
    from memcalc.replaying import ReplayComparison
    from memcalc.replaying.result import ReplayOptions
    from memcalc.tracing.module import ModuleOptions, UserModule


@overload
def trace(
    source: Source,
    *overrides: str,
    gpu: str | None = None,
    device: str = "fake",
    steps: int = 3,
    semantics: str = "cuda",
    alloc_conf: str = "",
    python: str | None = None,
    inputs: str | None = None,
    progress: Progress = silent,
    **fields: Any,
) -> TracedRun: ...


@overload
def trace(
    source: UserModule,
    inputs: Any,
    /,
    *,
    gpu: str | None = None,
    steps: int = 3,
    semantics: str = "cuda",
    alloc_conf: str = "",
    progress: Progress = silent,
    **options: Unpack[ModuleOptions],
) -> TracedModule: ...


def trace(
    source: Source | UserModule,
    *given: Any,
    gpu: str | None = None,
    device: str = "fake",
    steps: int = 3,
    semantics: str = "cuda",
    alloc_conf: str = "",
    python: str | None = None,
    inputs: str | None = None,
    progress: Progress = silent,
    **options: Any,
) -> TracedRun | TracedModule:
    """Run the real training step, generation or a module without a GPU. Needs torch.

    The result has events, timeline, replay, ledger, verdict and `result`, and the methods `phase_log()` and `plot()`.

    Args:
        source: as for `load`; a `torch.nn.Module`, which may be on any device and stays as it is; or "file.py:name" of
            a function that returns a module.
        given: overrides, as for `load`; or the module's inputs: a tuple of positional arguments, a mapping of keyword
            arguments, or one argument, in which tensors are replaced by their like on the device.
        gpu: as for `load`.
        device: "fake": tensors without values, anywhere; "null": PyTorch's CUDA build on stub libraries, on Linux.
            Modules run on the fake one.
        steps: optimizer steps to run.
        semantics: "cuda" or "cpu": the operators that run on fake tensors.
        alloc_conf: as PYTORCH_CUDA_ALLOC_CONF.
        python: for the null device, an interpreter with a CUDA build of torch; None: $MEMCALC_NULL_PYTHON or this one.
        inputs: "file.py:name" of the function that makes the inputs; None: `make_inputs` of a module's file, or inputs
            that follow from the configuration.
        progress: called with the progress of the work.
        options: of a configuration: fields, as for `load`; of a module's step: loss, optimizer, autocast, zero_grad,
            gradient_accumulation_steps, inference; see `memcalc.step.module_run.ModuleStep`. The optimizer of a module
            may be a name, such as "adamw".
    """
    from memcalc.errors import InputError
    from memcalc.spec.python_target import is_python_target
    from memcalc.tracing.module import is_module, trace_file, trace_module

    if is_module(source) or is_python_target(source):
        from memcalc.api.trace_result import shown_module

        _check_module(source, device, given)
        run = {"steps": steps, "semantics": semantics, "alloc_conf": alloc_conf, "progress": progress, **options}
        if isinstance(source, str):
            return shown_module(trace_file(source, inputs, gpu, **run))
        return shown_module(trace_module(cast("UserModule", source), given[0], gpu, **run))
    from memcalc.api.trace_result import shown_run

    spec = load_to_run(cast("Source", source), *given, gpu=gpu, **options)
    if device == "null":
        of_training(spec, "trace --device null")
        from memcalc.nullcuda.tracing import trace as trace_on_null

        return shown_run(trace_on_null(spec, steps, alloc_conf, python, progress, inputs))
    if device != "fake":
        raise InputError(f"device = {device!r} is not a device of trace.", "Choose fake or null.", "--device")
    from memcalc.tracing import trace as trace_on_fake

    return shown_run(trace_on_fake(spec, steps, semantics, alloc_conf, progress, inputs))


def _check_module(source: object, device: str, given: Sequence[Any]) -> None:
    """Check what is given with a module.

    Raises:
        InputError: another device, or not one value for the inputs of a module that is here.
    """
    from memcalc.errors import InputError

    if isinstance(source, str):
        if device != "fake" or given:
            raise InputError(
                "a module takes no overrides, and runs on the fake device.", "Leave overrides and device out.", source
            )
    elif device != "fake" or len(given) != 1:
        raise InputError(
            f"a module was given with device = {device!r} and {len(given)} inputs.",
            "Call trace(module, inputs), several inputs as one tuple; modules run on the fake device.",
            "module",
        )


def dry_run(
    command: Sequence[str],
    *,
    gpu: str,
    gpus: int = 1,
    timeout: float | None = None,
    **options: Unpack[Options],
) -> DryRun:
    """Run any training command on simulated GPUs, and report the memory of each process. Needs Linux and a C compiler.

    Args:
        command: the program and its arguments; its Python has a CUDA build of torch.
        gpu: a GPU of `memcalc gpus`.
        gpus: number of these GPUs on the simulated machine.
        timeout: seconds after which the command and its child processes are ended.
        options: steps, skip_init, random_weights, delayed_events, world_size, rank, history: see
            `memcalc.nullcuda.options.Options`.
    """
    from memcalc.nullcuda import run

    return run(command, gpu, gpus=gpus, timeout=timeout, **options)


def replay(
    source: Source,
    *overrides: str,
    gpu: str | None = None,
    budget: str | None = None,
    device: int | None = None,
    progress: Progress = silent,
    **options: Unpack[ReplayOptions],
) -> ReplayComparison:
    """Replay a run through an allocator, and compare other settings and allocators.

    Args:
        source: a file of events, a memory snapshot of PyTorch, or what `load` takes, which is traced.
        overrides: as for `load`.
        gpu: the GPU; None: the GPU of the configuration, else a device of unlimited size.
        budget: memory limit of the GPU, such as "12GiB"; None: its usable memory.
        device: index of the device in a snapshot.
        progress: called with the progress of a trace.
        options: allocator, alloc_conf, release, memory_fraction, sweep, compare: see
            `memcalc.replaying.result.ReplayOptions`.
    """
    from memcalc.replaying import replay_source
    from memcalc.replaying.sources import open_source
    from memcalc.spec.hardware.gpus import find_gpu, with_budget

    path = source if isinstance(source, str | Path) else None
    opened = open_source(path, lambda: of_training(load(source, *overrides, gpu=gpu), "replay"), device, progress)
    named = gpu or opened.gpu
    named = named if budget is None else with_budget(named, budget)
    return replay_source(opened, find_gpu(named) if named is not None else None, **options)
