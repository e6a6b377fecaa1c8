"""The command `trace` for a user's module."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeGuard

from memcalc.progress import Progress, silent
from memcalc.spec.hardware.gpus import DEFAULT_CARD, find_gpu
from memcalc.step.packages import require_torch
from memcalc.tracing.trace import check_semantics

if TYPE_CHECKING:
    from torch import Tensor, dtype
    from torch.nn import Module

    from memcalc.recorder.trace import ModuleTrace
    from memcalc.step.module_run import OptimizerFactory

    UserModule = Module  # for callers that must not import torch


class ModuleOptions(TypedDict, total=False):
    """Options of a module's training: see `memcalc.step.module_run.ModuleStep`, which has the defaults."""

    loss: Callable[[Any], Tensor]
    optimizer: OptimizerFactory | str | None
    autocast: dtype | None
    zero_grad: Literal["set_to_none", "zero"]
    gradient_accumulation_steps: int
    inference: Literal["inference_mode", "no_grad"] | None


def is_module(source: object) -> TypeGuard[Module]:
    """Return whether this is a torch.nn.Module. It imports no torch: without torch there are no modules."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(source, torch.nn.Module)


def trace_module(
    module: Module,
    inputs: Any,
    gpu: str | None = None,
    *,
    steps: int = 3,
    semantics: str = "cuda",
    alloc_conf: str = "",
    progress: Progress = silent,
    name: str | None = None,
    **options: Any,
) -> ModuleTrace:
    """Trace steps of any module on fake tensors: forward, backward and optimizer, or forward alone.

    Args:
        module: on any device; it is not changed, and none of its data is copied.
        inputs: of its forward: a tuple of positional arguments, a mapping of keyword arguments, or one argument.
        gpu: the GPU to check against; None: an A100 80 GB, without a verdict.
        steps: number of steps.
        semantics: kernels to emulate, "cuda" or "cpu".
        alloc_conf: as PYTORCH_CUDA_ALLOC_CONF.
        progress: called with the progress of the work.
        name: shown in reports; None: the name of the module's class.
        options: see `ModuleOptions`.

    Raises:
        InputError: the module cannot be copied, its code fails, nothing is trained, or settings are invalid.
    """
    check_semantics(semantics)
    from memcalc.recorder.trace import make_module_trace
    from memcalc.step.module_run import ModuleRun, ModuleStep
    from memcalc.step.optimizers import named_optimizer
    from memcalc.tracing.fake import record_fake

    optimizer = options.get("optimizer")
    words = step_description(optimizer, options.get("inference"), steps)
    if isinstance(optimizer, str):
        options["optimizer"] = named_optimizer(optimizer)
    gpu_spec = find_gpu(gpu or DEFAULT_CARD)
    run = partial(ModuleRun, ModuleStep(module, inputs, **options))
    recording = record_fake(run, gpu_spec, steps, cuda=semantics == "cuda", progress=progress)
    judged_by = None if gpu is None else gpu_spec
    return make_module_trace(name or type(module).__name__, words, recording, judged_by, alloc_conf, progress)


def trace_file(target: str, inputs: str | None, gpu: str | None = None, **options: Any) -> ModuleTrace:
    """Trace steps of a module from a user's Python file.

    Args:
        target: `file.py:name` of the function that makes it; see `memcalc.step.python_file.own_module`.
        inputs: `file.py:name` of the function that makes its inputs; None: `make_inputs` of the same file.
        gpu: as for `trace_module`.
        options: as for `trace_module`.

    Raises:
        InputError: as for `trace_module`; or the file or the name does not exist, or its code fails.
        Unavailable: torch is missing.
    """
    require_torch("trace")
    from memcalc.step.python_file import own_module

    found = own_module(target, inputs)
    return trace_module(found.module, found.inputs, gpu, name=found.name, **options)


def step_description(optimizer: object, inference: str | None, steps: int) -> str:
    """Return the description of the run for the screen."""
    times = "1 step" if steps == 1 else f"{steps:,} steps"
    if inference is not None:
        return f"forward under torch.{inference}(), {times}"
    if optimizer is None:
        return f"forward and backward without an optimizer, {times}"
    name = optimizer if isinstance(optimizer, str) else getattr(optimizer, "__name__", "an optimizer")
    return f"training with {name}, {times}"
