"""Sizing by formula: one run, or two side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.api.sources import Source, load

if TYPE_CHECKING:
    from memcalc.checking.comparison import Comparison
    from memcalc.ledger.result import Result
    from memcalc.spec.spec import Spec


def estimate(
    source: Source, *overrides: str, gpu: str | None = None, rehearse: bool = False, alloc_conf: str = ""
) -> Result:
    """What each GPU will hold, from closed formulas: no torch, no GPU, a tenth of a second.

    Of a family that only transformers knows there are no formulas, and of its modules of many others: their step is
    traced, where it can be, and the result says so.

    Args:
        source: as for `load`.
        overrides: as for `load`.
        gpu: as for `load`.
        rehearse: whether to play every request of three steps to a model of PyTorch's allocator, for the rests of
            blocks and for reserved memory; where their order is not known, a note says why.
        alloc_conf: as PYTORCH_CUDA_ALLOC_CONF, for the rehearsal.
    """
    spec = load(source, *overrides, gpu=gpu)
    if spec.model.transformers_config is not None or _needs_trace(spec):
        from memcalc.tracing.trace import in_place_of_formulas

        return in_place_of_formulas(spec)
    if rehearse:
        from memcalc.rehearsal.rehearsal import estimate_rehearsed

        return estimate_rehearsed(spec, alloc_conf)
    if spec.inference is not None:
        from memcalc.estimation.generation.largest import estimate_with_largest

        return estimate_with_largest(spec)
    from memcalc.estimation.estimate import estimate as estimate_spec

    return estimate_spec(spec)


def _needs_trace(spec: Spec) -> bool:
    """Whether formulas are missing and a trace can stand in for them."""
    from memcalc.estimation.blocks.catalogue import has_formulas
    from memcalc.tracing.trace import stands_in

    return not has_formulas(spec) and stands_in(spec)


def diff(a: Source, b: Source, *overrides: str, gpu: str | None = None) -> Comparison:
    """Two runs beside each other: components at each one's peak, and phases. Overrides apply to both."""
    from memcalc.checking.comparison import compare

    return compare(estimate(a, *overrides, gpu=gpu), estimate(b, *overrides, gpu=gpu))
