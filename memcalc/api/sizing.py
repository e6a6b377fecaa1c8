"""The size of one run, or of two compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memcalc.api.sources import Source, load
from memcalc.progress import Progress, silent

if TYPE_CHECKING:
    from memcalc.checking.comparison import Comparison
    from memcalc.ledger.result import Result
    from memcalc.spec.spec import Spec


def estimate(
    source: Source,
    *overrides: str,
    gpu: str | None = None,
    alloc_conf: str | None = None,
    rehearse: bool = True,  # noqa: ARG001 -- accepted from before every estimate was replayed
    trace: bool = True,
    progress: Progress = silent,
    **fields: Any,
) -> Result:
    """What each GPU holds: closed formulas, and a replay of all requests through a model of PyTorch's allocator.

    No torch, no GPU. The ledger of the result is by formula; the replay is made when reserved or device memory, or the
    verdict, is first read, and `result.replayed` has its ledger, which is what the command line shows. Models without
    formulas are traced in a child process where torch and transformers are installed; `result.source` is "trace" then.

    Args:
        source: as for `load`.
        overrides: as for `load`.
        gpu: as for `load`.
        alloc_conf: as PYTORCH_CUDA_ALLOC_CONF: short for the override "alloc_conf=...".
        rehearse: has no effect; every estimate has the replay.
        trace: whether a model without formulas is traced; else it is refused with the command that has the answer.
        progress: called with the progress of a trace that replaces formulas.
        fields: as for `load`.
    """
    settings = () if alloc_conf is None else (f"training.alloc_conf={alloc_conf}",)
    spec = load(source, *overrides, *settings, gpu=gpu, **fields)
    if trace and (spec.model.transformers_config is not None or _needs_trace(spec)):
        from memcalc.tracing.trace import in_place_of_formulas

        return in_place_of_formulas(spec, progress)
    from memcalc.verdict.judge import size_lazily

    return size_lazily(spec)


def _needs_trace(spec: Spec) -> bool:
    """Return whether formulas are missing and a trace can replace them."""
    from memcalc.architectures.catalogue import has_formulas

    if has_formulas(spec):
        return False
    from memcalc.tracing.trace import stands_in

    return stands_in(spec)


def diff(a: Source, b: Source, *overrides: str, gpu: str | None = None, **fields: Any) -> Comparison:
    """Compare two runs: components at each one's peak, and phases. Overrides and fields apply to both."""
    from memcalc.checking.comparison import compare

    first, second = (estimate(each, *overrides, gpu=gpu, **fields).replayed for each in (a, b))
    return compare(first, second)
