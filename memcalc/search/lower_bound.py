"""The lower bound of a search's run, which needs no verdict."""

from __future__ import annotations

from memcalc.spec.spec import Spec
from memcalc.verdict.judge import gpu_of
from memcalc.verdict.needs import least_bytes


def is_hopeless(spec: Spec) -> bool:
    """Return whether the lower bound exceeds the GPU."""
    gpu = gpu_of(spec)
    return gpu is not None and least_bytes(spec, gpu, gpu.usable_bytes) > gpu.usable_bytes
