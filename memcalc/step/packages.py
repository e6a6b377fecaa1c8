"""Checks that the packages of the training step are installed, without importing them; and bitsandbytes' import."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from types import ModuleType
from typing import cast

from memcalc.errors import Unavailable
from memcalc.extras import installation
from memcalc.spec.spec import Spec

_HUB_KERNELS = "kernels"


def require(verb: str, spec: Spec) -> None:
    """Check that this Python has the packages that the step of a run needs.

    Args:
        verb: the memcalc command, for the message.
        spec: the run.

    Raises:
        Unavailable: a package is missing.
    """
    require_torch(verb)
    if spec.training.implementation == "huggingface" and importlib.util.find_spec("transformers") is None:
        raise Unavailable(
            f"implementation = huggingface needs transformers, which is not installed. Run: {installation('hf')}"
        )


def require_torch(verb: str) -> None:
    """Check that this Python has torch.

    Raises:
        Unavailable: torch is missing.
    """
    if importlib.util.find_spec("torch") is None:
        raise Unavailable(f"{verb} needs PyTorch, which is not installed. Run: {installation('torch')}")


def import_package(module: str) -> ModuleType:
    """Import a module of an optional package, without running code from the hub.

    On CPUs with AVX-512 BF16, importing bitsandbytes (which other packages import) downloads a kernel from the hub and
    runs it, or warns that the package `kernels` is missing (bitsandbytes 0.50, backends/cpu/ops.py). Therefore
    `kernels`
    cannot be imported during this call.
    """
    modules = cast("dict[str, ModuleType | None]", sys.modules)  # None: the import system's mark of a missing module
    kernels, logger = modules.get(_HUB_KERNELS), logging.getLogger("bitsandbytes.backends.cpu.ops")
    warns = not logger.disabled
    modules[_HUB_KERNELS], logger.disabled = None, True
    try:
        return importlib.import_module(module)
    finally:
        logger.disabled = not warns
        del modules[_HUB_KERNELS]
        if kernels is not None:
            modules[_HUB_KERNELS] = kernels
