"""The packages that the training step needs: whether they are installed, without importing them; bitsandbytes."""

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
    """Whether this Python has what the step of a run needs.

    Args:
        verb: of memcalc, which the message names.
        spec: the run.

    Raises:
        Unavailable: a package is missing.
    """
    require_torch(verb)
    if spec.training.implementation == "huggingface" and importlib.util.find_spec("transformers") is None:
        raise Unavailable(f"implementation = huggingface runs transformers' modules: {installation('hf')}")


def require_torch(verb: str) -> None:
    """Whether this Python has torch.

    Raises:
        Unavailable: it is missing.
    """
    if importlib.util.find_spec("torch") is None:
        raise Unavailable(f"{verb} runs the training step in PyTorch: {installation('torch')}")


def import_package(module: str) -> ModuleType:
    """Import a module of a package that is no dependency of ours, without code from the hub.

    On CPUs with AVX-512 BF16 the import of bitsandbytes, which others of them import, downloads a kernel from the hub
    and runs it, or warns that the package `kernels` is missing (bitsandbytes 0.50, backends/cpu/ops.py). Meanwhile
    that package cannot be imported here.
    """
    modules = cast("dict[str, ModuleType | None]", sys.modules)  # None: the import system's mark of what is not found
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
