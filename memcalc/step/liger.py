"""Liger's kernels in a transformers model, active only while its step runs."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

from memcalc.errors import Unavailable


def liger_modules(module: nn.Module) -> Callable[[], AbstractContextManager[None]]:
    """Give a model Liger's norms and MLPs; return a context that also gives its source module Liger's RoPE.

    Liger replaces names in the transformers module, which all other models of the process use too. They are restored
    immediately, and replaced again only while this model runs.

    Raises:
        Unavailable: liger-kernel is not installed.
    """
    if importlib.util.find_spec("liger_kernel") is None:
        raise Unavailable("kernels = liger needs Liger, which is not installed. Run: pip install liger-kernel")
    theirs: Any = importlib.import_module("liger_kernel.transformers.monkey_patch")
    file = vars(sys.modules[type(module).__module__])
    own = dict(file)
    theirs._apply_liger_kernel_to_instance(model=module, fused_linear_cross_entropy=False)  # noqa: SLF001 -- as Trainer
    patched = {name: value for name, value in file.items() if own.get(name) is not value}
    original = {name: own[name] for name in patched}
    file.update(original)

    @contextmanager
    def replaced() -> Iterator[None]:
        file.update(patched)
        try:
            yield
        finally:
            file.update(original)

    return replaced
