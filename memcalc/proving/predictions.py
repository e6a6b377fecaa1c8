"""What is predicted of a run that is measured."""

from __future__ import annotations

from typing import get_args

from memcalc.estimation.estimate import estimate
from memcalc.ledger.result import Result
from memcalc.rehearsal.rehearsal import estimate_rehearsed
from memcalc.spec.spec import Spec
from memcalc.spec.training import TorchVersion


def estimate_on_a_card(spec: Spec, alloc_conf: str = "", torch: str = "") -> Result:
    """The estimate, rehearsed where that is possible and PyTorch's CUDA allocator is what serves the run.

    Args:
        spec: the run.
        alloc_conf: PYTORCH_CUDA_ALLOC_CONF of the run.
        torch: the PyTorch that runs it, as it calls itself.
    """
    spec = under(spec, torch)
    return estimate(spec) if spec.hardware.gpu is None else estimate_rehearsed(spec, alloc_conf)


def under(spec: Spec, torch: str) -> Spec:
    """The run under the release of PyTorch that runs it ("2.11.0+cu130"); as it is where that release has no rules."""
    release = "v" + ".".join(torch.split(".")[:2])
    if release not in get_args(TorchVersion):
        return spec
    return spec.model_copy(update={"training": spec.training.model_copy(update={"torch_version": release})})
