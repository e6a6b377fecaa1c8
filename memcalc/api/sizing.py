"""Estimate one run, or compare two."""

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
    """Estimate the memory of each GPU, by formulas and by a replay through a model of the PyTorch allocator.

    Needs no torch and no GPU. The ledger of the result is by formula. The replay runs when reserved memory, device
    memory or the verdict is first read. `result.replayed` has the ledger of the replay, as the command line shows.
    Models without formulas are traced in a child process if torch and transformers are installed; then
    `result.source` is "trace".

    Args:
        source: as for `load`.
        overrides: as for `load`.
        gpu: as for `load`.
        alloc_conf: as PYTORCH_CUDA_ALLOC_CONF: short for the override "alloc_conf=...".
        rehearse: has no effect; every estimate has the replay.
        trace: whether to trace a model without formulas; else the error names the command to use.
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
    """Compare two runs by phase, and by component at each peak. Overrides and fields apply to both."""
    from memcalc.checking.comparison import compare

    first, second = (estimate(each, *overrides, gpu=gpu, **fields).replayed for each in (a, b))
    return compare(first, second)
