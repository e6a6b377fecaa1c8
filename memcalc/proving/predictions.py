"""What is predicted of a run that is measured."""

from __future__ import annotations

from memcalc.estimation.estimate import estimate
from memcalc.ledger.result import Result
from memcalc.rehearsal.rehearsal import estimate_rehearsed
from memcalc.spec.spec import Spec


def estimate_on_a_card(spec: Spec, alloc_conf: str = "") -> Result:
    """The estimate, rehearsed where that is possible and PyTorch's CUDA allocator is what serves the run.

    Args:
        spec: the run.
        alloc_conf: PYTORCH_CUDA_ALLOC_CONF of the run.
    """
    return estimate(spec) if spec.hardware.gpu is None else estimate_rehearsed(spec, alloc_conf)
