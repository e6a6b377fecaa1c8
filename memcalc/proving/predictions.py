"""What is predicted of a run that is measured."""

from __future__ import annotations

from typing import get_args

from memcalc.estimation.estimate import estimate
from memcalc.ledger.result import Result
from memcalc.spec.spec import Spec
from memcalc.spec.training import TorchVersion
from memcalc.verdict.judge import size


def estimate_on_a_card(spec: Spec, alloc_conf: str = "", torch: str = "") -> Result:
    """The estimate, with its allocator replay where PyTorch's CUDA allocator is what serves the run.

    Args:
        spec: the run.
        alloc_conf: PYTORCH_CUDA_ALLOC_CONF of the run.
        torch: the PyTorch that runs it, as it calls itself.
    """
    spec = under(spec, torch)
    if spec.hardware.gpu is None:
        return estimate(spec)
    return size(with_settings(spec, alloc_conf))


def with_settings(spec: Spec, alloc_conf: str) -> Spec:
    """The run under settings of PyTorch's allocator."""
    return spec.model_copy(update={"training": spec.training.model_copy(update={"alloc_conf": alloc_conf})})


def under(spec: Spec, torch: str) -> Spec:
    """The run under the release of PyTorch that runs it ("2.11.0+cu130"); as it is where that release has no rules."""
    release = "v" + ".".join(torch.split(".")[:2])
    if release not in get_args(TorchVersion):
        return spec
    return spec.model_copy(update={"training": spec.training.model_copy(update={"torch_version": release})})
