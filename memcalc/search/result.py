"""Query and result of `fit`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypedDict

from memcalc.jupyter import NotebookDisplay
from memcalc.ledger.result import Result
from memcalc.ledger.verdict import Answer
from memcalc.search.layouts import ExcludedLayout
from memcalc.search.maxima import Maximum
from memcalc.search.minima import GpuVerdict, LeastRecompute
from memcalc.search.offers import Offer
from memcalc.search.ranking import BestLayout, Ranking
from memcalc.spec.hardware.gpus import GpuSpec
from memcalc.spec.hardware.interconnect import System
from memcalc.spec.spec import Spec
from memcalc.suggestions.change_search import SuggestedChange
from memcalc.text import harmless
from memcalc.verdict.reasons import Reason


@dataclass(frozen=True, slots=True)
class FitQuery:
    """The query of `fit`."""

    gpus: int | None = None  # total number of GPUs; None: the run's. For the fewest GPUs: the maximum to try.
    maximize: str | None = None  # one of `maxima.MAXIMA`; None: everything is requested
    minimize: str | None = None  # one of `minima.MINIMA`; None: everything is requested
    fixed_fields: tuple[str, ...] = ()  # fields that keep the run's own value in every layout
    node: int | None = None  # GPUs per node; None: from the GPU's table
    nic_gbit: float | None = None  # network bandwidth per GPU in 10^9 bit/s; None: from the table
    top: int = 5  # number of layouts to return in full
    # of one GPU for one hour, by its name, for the lowest cost
    prices: Mapping[str, float] = field(default_factory=dict)


class Cluster(TypedDict, total=False):
    """The machines of a query, and the length of its result."""

    node: int | None  # GPUs per node; None: from the GPU's table
    nic_gbit: float | None  # network bandwidth per GPU in 10^9 bit/s; None: from the table
    top: int  # number of layouts to return in full


class Nearest(NamedTuple):
    """A change that makes the run fit."""

    change: SuggestedChange  # the change
    # relative increase of GPU time per token by the cost model (0.33: a third more); None: unknown
    slowdown: float | None
    host_bytes: int = 0  # host memory of a rank
    node_host_bytes: int = 0  # host memory of all ranks of a node


@dataclass(slots=True)
class FitResult(NotebookDisplay):
    """The result of `fit`; fields that were not requested are empty.

    Args:
        query: the query.
        gpu: the GPU.
        system: the node and network.
        gpus: number of GPUs.
        sequences: per optimizer step, in every layout.
        unchanged: the estimate of the unchanged run; data parallelism is adjusted if the number of GPUs differs.
        unasked: why there is no such run.
        name: of the run.
        base: the run that maxima and minima refer to: the unchanged run, else the best layout; None: there is neither.
        base_is_best: whether it is the best layout.
        maxima: by the quantity that was maximized.
        ranking: all layouts that fit, the cheapest first.
        best: the cheapest ones, in full.
        pruned: excluded layouts and their number.
        smallest_changes: changes that make the run fit, by kind of result, smallest first. If the least recomputation
            was requested and full recomputation is not enough: changes in addition to it.
        fewest: the fewest GPUs; None: no number tried is enough.
        may_be_fewer: whether a layout over fewer GPUs may fit, or, if no number is enough, over any.
        offers: every GPU with a price, the one with the lowest cost per token first.
        gpu_verdicts: the need of the run on every GPU of the same vendor, the smallest first.
        least_recompute: the least recomputation; None: full recomputation is not enough.
        all_recomputed: the run with full recomputation, if that is not enough.
        reason: the reason for the peak of a run that does not fit, with the cheapest change that makes it fit, if there
            is no list of changes.
    """

    query: FitQuery
    gpu: GpuSpec
    system: System
    gpus: int
    sequences: int
    unchanged: Result | None
    unasked: str
    name: str
    base: Spec | None = None
    base_is_best: bool = False
    maxima: dict[str, Maximum] = field(default_factory=dict)
    ranking: Ranking | None = None
    best: list[BestLayout] = field(default_factory=list)
    pruned: dict[ExcludedLayout, int] = field(default_factory=dict)
    smallest_changes: list[Nearest] = field(default_factory=list)
    fewest: int | None = None
    may_be_fewer: bool = False
    offers: list[Offer] = field(default_factory=list)
    gpu_verdicts: list[GpuVerdict] = field(default_factory=list)
    least_recompute: LeastRecompute | None = None
    all_recomputed: Result | None = None
    reason: Reason | None = None

    def __repr__(self) -> str:
        """Return the verdict and the number of layouts that fit, in one line."""
        layouts = 0 if self.ranking is None else len(self.ranking.fitting)
        return f"<Fit {harmless(self.name)} on {self.gpus} {self.gpu.name}: {self.verdict}; {layouts} layouts fit>"

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the config file of the run."""
        known = self.unchanged or (self.best[0].result if self.best else None)
        return () if known is None else known.notes

    @property
    def changed(self) -> Result | None:
        """The run that does not fit and for which changes were tried; None if there is none."""
        if self.all_recomputed is not None:
            return self.all_recomputed
        everything = self.query.maximize is None and self.query.minimize is None
        return (
            self.unchanged if everything and self.unchanged is not None and self.unchanged.verdict != "fits" else None
        )

    @property
    def smallest(self) -> GpuVerdict | None:
        """The smallest GPU of `gpu_verdicts` on which the run fits."""
        return next((sized for sized in self.gpu_verdicts if sized.suffices), None)

    @property
    def verdict(self) -> Answer:
        """The verdict on the query: fits, does not fit, or unknown."""
        query = self.query
        if query.maximize is not None:
            return _best_of(map(_of_maximum, self.maxima.values()))
        if query.minimize == "gpus":
            return "fits" if self.fewest is not None else "unknown" if self.may_be_fewer else "does-not-fit"
        if query.minimize == "gpu_kind":
            return _best_of(sized.verdict.answer for sized in self.gpu_verdicts if not sized.lacks)
        if query.minimize == "cost":
            return _best_of(offer.verdict for offer in self.offers)
        if query.minimize == "recompute":
            full = None if self.all_recomputed is None else self.all_recomputed.verdict
            return "fits" if self.least_recompute is not None else full or "does-not-fit"
        if self.best:
            return "fits"
        undecided = self.ranking is not None and self.ranking.undecided > 0
        asked = None if self.unchanged is None else self.unchanged.verdict
        return _best_of((asked or "does-not-fit", "unknown" if undecided else "does-not-fit"))

    @property
    def fits(self) -> bool:
        """Whether the verdict is "fits"."""
        return self.verdict == "fits"


def _best_of(answers: Iterable[Answer]) -> Answer:
    return min(answers, key=_ANSWERS.index, default="does-not-fit")


_ANSWERS: tuple[Answer, ...] = ("fits", "unknown", "does-not-fit")


def _of_maximum(found: Maximum) -> Answer:
    if found.value:
        return "unknown" if found.is_at_most else "fits"
    return "does-not-fit" if found.next_verdict is None else found.next_verdict.answer
