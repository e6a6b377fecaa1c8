"""Predictions for a measured run."""

from __future__ import annotations

from typing import get_args

from memcalc.estimation.estimate import estimate
from memcalc.ledger.result import Result
from memcalc.spec.spec import Spec
from memcalc.spec.training import TorchVersion
from memcalc.verdict.judge import size


def estimate_on_gpu(spec: Spec, alloc_conf: str = "", torch: str = "") -> Result:
    """Return the estimate, with an allocator replay if the run uses the PyTorch CUDA allocator.

    Args:
        spec: the run.
        alloc_conf: PYTORCH_CUDA_ALLOC_CONF of the run.
        torch: version of PyTorch that runs it, as in `torch.__version__`.
    """
    spec = under(spec, torch)
    if spec.hardware.gpu is None:
        return estimate(spec)
    return size(spec.with_training(alloc_conf=alloc_conf))


def under(spec: Spec, torch: str) -> Spec:
    """Return the run under a version of PyTorch ("2.11.0+cu130"); unchanged if memcalc has no rules for it."""
    release = "v" + ".".join(torch.split(".")[:2])
    if release not in get_args(TorchVersion):
        return spec
    return spec.with_training(torch_version=release)
