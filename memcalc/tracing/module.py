"""The verb `trace` on somebody's own module."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeGuard

from memcalc.progress import Progress, silent
from memcalc.recorder.judged import Judged, judge
from memcalc.spec.cards import find_card
from memcalc.tracing.trace import DEFAULT_CARD, check_semantics

if TYPE_CHECKING:
    from torch import Tensor, dtype
    from torch.nn import Module

    from memcalc.step.module_run import OptimizerFactory

    UserModule = Module  # for those who must not know torch


class ModuleOptions(TypedDict, total=False):
    """How a module is trained: see `memcalc.step.module_run.ModuleStep`, which has the defaults."""

    loss: Callable[[Any], Tensor]
    optimizer: OptimizerFactory | None
    autocast: dtype | None
    zero_grad: Literal["set_to_none", "zero"]
    gradient_accumulation_steps: int


def is_module(source: object) -> TypeGuard[Module]:
    """Whether this is a torch.nn.Module. Loads no torch: without it there is none."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(source, torch.nn.Module)


def trace_module(
    module: Module,
    inputs: Any,
    gpu: str | None = None,
    steps: int = 3,
    semantics: str = "cuda",
    alloc_conf: str = "",
    progress: Progress = silent,
    **options: Any,
) -> Judged:
    """Forward, backward and optimizer steps of any module on fake tensors.

    Args:
        module: anywhere; it stays as it is, and none of its data is copied.
        inputs: of its forward: a tuple of positional arguments, a mapping of keyword arguments, or one argument.
        gpu: the card to judge by; None: an A100 80 GB, without a verdict.
        steps: how many.
        semantics: "cuda" or "cpu": whose operators run.
        alloc_conf: as PYTORCH_CUDA_ALLOC_CONF.
        progress: told how far the work is.
        options: see `ModuleOptions`.

    Raises:
        InputError: the module cannot be copied, nothing is trained, or settings are wrong.
    """
    check_semantics(semantics)
    from memcalc.step.module_run import ModuleRun, ModuleStep
    from memcalc.tracing.fake import record_fake

    card = find_card(gpu or DEFAULT_CARD)
    run = partial(ModuleRun, ModuleStep(module, inputs, **options))
    recording = record_fake(run, card, steps, cuda=semantics == "cuda", progress=progress)
    return judge(recording, None if gpu is None else card, alloc_conf, progress=progress)
