"""The document of `fit`. Bytes are integers, seconds are numbers."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from memcalc.documents.shared import (
    SCHEMA_VERSION,
    IntervalBytes,
    LimitRow,
    OutsideAllocated,
    by_name,
    filled,
    interval,
    limit_row,
)
from memcalc.ledger.result import Result
from memcalc.ledger.verdict import Answer
from memcalc.search.costs import TERMS
from memcalc.search.exported_layout import ExportedLayout
from memcalc.search.maxima import Maximum
from memcalc.search.offers import Offer
from memcalc.search.ranking import BestLayout, Ranking
from memcalc.search.result import FitResult, Nearest
from memcalc.spec.spec import Spec
from memcalc.verdict.reasons import Reason


class FitGpu(TypedDict):
    """The GPU."""

    name: str
    usable_bytes: int


class FitSystem(TypedDict):
    """The node and network of the GPU, per direction."""

    node: int
    """GPUs per node"""
    link: str
    link_bytes_per_second: float
    network_bytes_per_second: float
    """per GPU"""
    flops: float
    """dense 16-bit FLOP/s per GPU"""
    source: str
    assumed: str | None
    """which of these are defaults"""


class FitSized(TypedDict):
    """An estimate of the rank that needs most."""

    verdict: Answer | None
    fits: bool | None
    interval: IntervalBytes | None
    limits: list[LimitRow]
    """features of the run that need memory and are not modelled"""
    phase: str
    pipeline_stage: int
    allocated_bytes: int
    device_bytes: int | None
    components: dict[str, int]
    """bytes at the peak; their sum is allocated_bytes"""
    outside_allocated: OutsideAllocated


class FitCosts(TypedDict):
    """Seconds of one optimizer step at peak rates, by term; see cost_terms."""

    compute: float
    recompute: float
    tensor: float
    context: float
    expert: float
    pipeline: float
    bubble: float
    data: float
    total: float


class FitLayout(TypedDict):
    """A layout, under the names of a configuration."""

    tensor_parallel: int
    sequence_parallel: bool
    context_parallel: int
    expert_parallel: int
    pipeline_parallel: int
    schedule: str
    virtual_stages: int
    data_parallel: int
    data_parallel_replicate: int
    zero_stage: int
    engine: str
    recompute: str | list[Any]
    """or layers by number; a nested list is one checkpoint segment"""
    micro_batch_size: int
    gradient_accumulation_steps: int


class FitRanked(FitLayout):
    """A layout that fits."""

    device_bytes: int
    cost_seconds: FitCosts


class FitBest(FitLayout, FitSized):
    """The cheapest layout of a split, with its memory."""

    cost_seconds: FitCosts


class FitLayouts(TypedDict):
    """Result for all layouts, the cheapest first."""

    tried: int
    undecided: int
    """layouts that may fit and do not fit for certain"""
    fitting: list[FitRanked]
    best: list[FitBest]


class FitMaximum(TypedDict):
    """The largest value that fits, everything else as in maxima_of."""

    value: int
    """0: none fits"""
    close: bool
    """whether only its replay fits: the GPU's memory is inside the interval"""
    at_most: bool
    """whether a feature that needs memory is not modelled"""
    now: int
    step: int | None
    """distance between values, where it is always the same"""
    next_value: int | None
    next_device_bytes: int | None
    """a lower bound where bounds decide"""
    next_verdict: Answer | None
    """unknown: it may fit"""
    end: str | None
    """why there is no larger value, if memory is not the reason"""
    neighbours_tried: int
    """the next larger values, of which none fits"""
    smaller_that_do_not_fit: list[int]
    """smaller values that the search tried and that do not fit"""
    parameters: int
    set: list[str]
    """the fields of this run in the syntax of --set; empty: none, or no value fits"""
    note: str | None
    estimate: FitSized | None


class FitCard(TypedDict):
    """Memory of the run on one GPU."""

    name: str
    device_bytes: int
    """a lower bound where bounds decide"""
    usable_bytes: int
    verdict: Answer
    fits: bool | None
    lacks: str | None
    """why this run is invalid on the GPU, regardless of memory"""


class FitRecompute(TypedDict):
    """The least recomputation that fits."""

    plan: str | list[Any]
    layers: int
    """recomputed layers of each stage, or of each of its chunks"""
    of: int
    device_bytes: int


class FitOffer(TypedDict):
    """A type of GPU at the user's price."""

    name: str
    price_per_hour: float
    """the given price of one GPU for one hour"""
    verdict: Answer
    """whether some layout over some number of these GPUs fits"""
    lacks: str | None
    """why this run is invalid on the GPU, regardless of memory"""
    may_be_fewer: bool
    """whether some layout over fewer GPUs may fit"""
    gpus: int | None
    """number of GPUs on which a token costs least; null: no number that was tried is enough"""
    all_per_hour: float | None
    """price of all GPUs"""
    per_million_tokens: float | None
    """cost at peak rates: it compares GPUs and forecasts no bill"""
    layout: FitLayout | None
    """the cheapest layout over these GPUs"""


class FitMinima(TypedDict):
    """Results of --minimize; null if nothing fits."""

    gpus: NotRequired[int | None]
    may_be_fewer: NotRequired[bool]
    """whether some layout over fewer GPUs may fit"""
    gpu_kind: NotRequired[str | None]
    cards: NotRequired[list[FitCard] | None]
    cost: NotRequired[list[FitOffer] | None]
    """the GPU on which a token costs least comes first"""
    recompute: NotRequired[FitRecompute | None]
    all_recomputed: NotRequired[FitSized | None]
    """the run with every layer recomputed, where that is not enough: `nearest` changes it"""


class FitNearest(TypedDict):
    """A change, or a pair of them, that makes the run fit."""

    levers: list[str]
    set: list[str]
    """the change in the syntax of --set; hardware.gpu in place of --gpu"""
    cost: str
    card_time_per_token: float | None
    """1: unchanged; null: not known to the cost model"""
    result: str
    """effect on the training result"""
    device_bytes: int
    host_bytes: int
    """host memory of a rank"""
    node_host_bytes: int
    """host memory of all ranks of a node"""


class FitRemedy(TypedDict):
    """The cheapest single change that makes a run fit and keeps the result of training."""

    set: list[str]
    device_bytes: int
    cost: str
    host_bytes: int
    node_host_bytes: int


class FitReason(TypedDict):
    """The reason for the peak of the run that does not fit."""

    phase: str
    largest: dict[str, int]
    """the largest components at the peak"""
    optimizer_lists: int
    """temporaries of the optimizer's foreach update, if they are large"""
    fragmented: int
    """reserved and not allocated, if that alone makes the run too large"""
    remedy: FitRemedy | None


class FitPruned(TypedDict):
    """Layouts that a rule excludes."""

    choice: str | None
    reason: str
    times: int


class FitTerm(TypedDict):
    """A term of the cost."""

    meaning: str
    source: str


class FitWritten(TypedDict):
    """A layout as another program's file."""

    file: str
    settings: list[str]
    """options that complete the file, in the syntax of --set"""
    command: str
    """command that estimates the layout from the file and the settings"""
    device_bytes: int | None
    """memory of a GPU when the file's program runs the layout"""
    verdict: str | None
    """whether it fits then"""


class FitDocument(TypedDict):
    """The document that `fit --format json` prints."""

    schema_version: Literal[2]
    source: Literal["fit"]
    name: str
    verdict: Answer
    fits: bool
    gpu: FitGpu
    gpus: int
    system: FitSystem
    sequences_per_step: int
    as_it_is: FitSized | None
    """null: not_as_it_is says why"""
    not_as_it_is: str | None
    layouts: FitLayouts | None
    """null: not requested"""
    maxima_of: FitLayout | None
    maxima: dict[str, FitMaximum]
    minima: FitMinima
    nearest: list[FitNearest]
    reason: FitReason | None
    """if not even the smallest value fits, or no change helps"""
    written: FitWritten | None
    """null: --write was not given, or nothing fits"""
    notes: list[str]
    pruned: list[FitPruned]
    cost_terms: dict[str, FitTerm]


def fit_document(answer: FitResult, written: ExportedLayout | None = None, file: Path | None = None) -> FitDocument:
    """Return the document of a search, with every layout that fits, the cheapest first.

    Args:
        answer: the result.
        written: a layout as another program's file; None: none was written.
        file: where that was written to.
    """
    system = answer.system
    return {
        "schema_version": SCHEMA_VERSION,
        "source": "fit",
        "name": answer.name,
        "verdict": answer.verdict,
        "fits": answer.fits,
        "gpu": filled(FitGpu, answer.gpu),
        "gpus": answer.gpus,
        "system": filled(
            FitSystem,
            system,
            link_bytes_per_second=system.link_bytes,
            network_bytes_per_second=system.nic_bytes,
            assumed=system.assumed or None,
        ),
        "sequences_per_step": answer.sequences,
        "as_it_is": None if answer.unchanged is None else _sized(answer.unchanged),
        "not_as_it_is": answer.unasked or None,
        "layouts": None if answer.ranking is None else _layouts(answer, answer.ranking),
        "maxima_of": None if answer.base is None else layout_fields(answer.base),
        "maxima": {name: _maximum(found) for name, found in answer.maxima.items()},
        "minima": _minima(answer),
        "nearest": [_nearest(found) for found in answer.smallest_changes],
        "reason": None if answer.reason is None else _reason(answer.reason),
        "written": None
        if written is None or file is None
        else {
            "file": str(file),
            "settings": list(written.file.settings),
            "command": shlex.join(written.file.command(file)),
            "device_bytes": written.result.headline.device_bytes,
            "verdict": written.result.verdict,
        },
        "notes": list(answer.notes),
        "pruned": [
            {"choice": choice or None, "reason": reason, "times": times}
            for (choice, reason), times in answer.pruned.items()
        ],
        "cost_terms": {name: {"meaning": meaning, "source": source} for name, (meaning, source) in TERMS.items()},
    }


def layout_fields(spec: Spec) -> FitLayout:
    """Return the fields of a layout under their names in a configuration."""
    training, recompute = spec.training, spec.training.recompute
    return filled(
        FitLayout,
        spec.parallelism,
        recompute=recompute if isinstance(recompute, str) else list(recompute),
        micro_batch_size=training.micro_batch_size,
        gradient_accumulation_steps=training.gradient_accumulation_steps,
    )


def _layouts(answer: FitResult, ranking: Ranking) -> FitLayouts:
    return {
        "tried": ranking.tried,
        "undecided": ranking.undecided,
        "fitting": [
            {
                **layout_fields(found.spec),
                "device_bytes": found.device_bytes,
                "cost_seconds": filled(FitCosts, found.costs),
            }
            for found in ranking.fitting
        ],
        "best": [_best(found) for found in answer.best],
    }


def _best(found: BestLayout) -> FitBest:
    return {**layout_fields(found.result.spec), **_sized(found.result), "cost_seconds": filled(FitCosts, found.costs)}


def _sized(result: Result) -> FitSized:
    ledger, headline = result.ledger, result.headline
    return {
        "verdict": result.verdict,
        "fits": result.fits,
        "interval": interval(result.decision),
        "limits": [limit_row(limit) for limit in result.limits if limit.holds_memory],
        "phase": ledger.peak_phase,
        "pipeline_stage": headline.rank["pipeline_stage"],
        "allocated_bytes": ledger.peak_bytes,
        "device_bytes": headline.device_bytes,
        "components": by_name(ledger.components(ledger.peak_phase)),
        "outside_allocated": filled(OutsideAllocated, headline.outside),
    }


def _maximum(found: Maximum) -> FitMaximum:
    return filled(
        FitMaximum,
        found,
        close=found.is_close,
        at_most=found.is_at_most,
        step=found.step or None,
        next_device_bytes=found.next_bytes,
        next_verdict=None if found.next_verdict is None else found.next_verdict.answer,
        end=found.end or None,
        neighbours_tried=found.above,
        smaller_that_do_not_fit=list(found.gaps),
        set=list(found.overrides),
        note=found.note or None,
        estimate=None if found.result is None else _sized(found.result),
    )


def _minima(answer: FitResult) -> FitMinima:
    wanted = answer.query.minimize
    if wanted == "gpus":
        return {"gpus": answer.fewest, "may_be_fewer": answer.may_be_fewer}
    if wanted == "gpu_kind":
        return {
            "gpu_kind": answer.smallest.gpu.name if answer.smallest else None,
            "cards": [
                filled(
                    FitCard,
                    sized.gpu,
                    device_bytes=sized.device_bytes,
                    verdict=sized.verdict.answer,
                    fits=sized.verdict.fits,
                    lacks=sized.lacks or None,
                )
                for sized in answer.gpu_verdicts
            ],
        }
    if wanted == "cost":
        return {"cost": [_offer(offer) for offer in answer.offers]}
    if wanted == "recompute":
        found = answer.least_recompute
        if found is None:
            full = answer.all_recomputed
            return {"recompute": None, "all_recomputed": None if full is None else _sized(full)}
        plan = found.recompute if isinstance(found.recompute, str) else list(found.recompute)
        return {"recompute": filled(FitRecompute, found, plan=plan)}
    return {}


def _offer(offer: Offer) -> FitOffer:
    found = offer.layouts
    return filled(
        FitOffer,
        offer,
        name=offer.gpu.name,
        price_per_hour=offer.price,
        lacks=offer.lacks or None,
        gpus=None if found is None else found.gpus,
        all_per_hour=offer.hourly,
        per_million_tokens=None if found is None else offer.of_tokens,
        layout=None if found is None else layout_fields(found.best[0].result.spec),
    )


def _nearest(found: Nearest) -> FitNearest:
    change = found.change
    return {
        "levers": list(change.levers),
        "set": list(change.overrides),
        "cost": change.cost,
        "result": change.result,
        "card_time_per_token": None if found.slowdown is None else 1 + found.slowdown,
        "device_bytes": change.needed,
        "host_bytes": found.host_bytes,
        "node_host_bytes": found.node_host_bytes,
    }


def _reason(reason: Reason) -> FitReason:
    remedy = reason.remedy
    return filled(
        FitReason,
        reason,
        largest={part.value: size for part, size in reason.largest},
        optimizer_lists=reason.lists,
        remedy=None if remedy is None else filled(FitRemedy, remedy, set=list(remedy.overrides)),
    )
