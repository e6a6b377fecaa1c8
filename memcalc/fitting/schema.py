"""Pydantic models of the JSON of `fit`: the source of its JSON Schema, and its check in tests."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from memcalc.ledger.schema import IntervalBytes, LimitRow, OutsideAllocated
from memcalc.ledger.verdict import Answer
from memcalc.spec.model import Block


class FitGpu(Block):
    """The GPU."""

    name: str
    usable_bytes: int


class FitSystem(Block):
    """The node and network of the GPU, per direction."""

    node: int = Field(description="GPUs per node")
    link: str
    link_bytes_per_second: float
    network_bytes_per_second: float = Field(description="per GPU")
    flops: float = Field(description="dense 16-bit FLOP/s per GPU")
    source: str
    assumed: str | None = Field(description="which of these are defaults")


class FitSized(Block):
    """An estimate of the rank that needs most."""

    verdict: Answer | None
    fits: bool | None
    interval: IntervalBytes | None
    limits: list[LimitRow] = Field(description="features of the run that need memory and are not modelled")
    phase: str
    pipeline_stage: int
    allocated_bytes: int
    device_bytes: int | None
    components: dict[str, int] = Field(description="bytes at the peak; their sum is allocated_bytes")
    outside_allocated: OutsideAllocated


class FitCosts(Block):
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


class FitLayout(Block):
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
    recompute: str | list[Any] = Field(description="or layers by number; a nested list is one checkpoint segment")
    micro_batch_size: int
    gradient_accumulation_steps: int


class FitRanked(FitLayout):
    """A layout that fits."""

    device_bytes: int
    cost_seconds: FitCosts


class FitBest(FitLayout, FitSized):
    """The cheapest layout of a split, with its memory."""

    cost_seconds: FitCosts


class FitLayouts(Block):
    """Result for all layouts, the cheapest first."""

    tried: int
    undecided: int = Field(description="layouts that may fit and do not fit for certain")
    fitting: list[FitRanked]
    best: list[FitBest]


class FitMaximum(Block):
    """The largest value that fits, everything else as in maxima_of."""

    value: int = Field(description="0: none fits")
    close: bool = Field(description="whether only its replay fits: the GPU's memory is inside the interval")
    at_most: bool = Field(description="whether a feature that needs memory is not modelled")
    now: int
    step: int | None = Field(description="distance between values, where it is always the same")
    next_value: int | None
    next_device_bytes: int | None = Field(description="a lower bound where bounds decide")
    next_verdict: Answer | None = Field(description="unknown: it may fit")
    end: str | None = Field(description="why there is no larger value, if memory is not the reason")
    neighbours_tried: int = Field(description="the next larger values, of which none fits")
    smaller_that_do_not_fit: list[int] = Field(description="smaller values that the search tried and that do not fit")
    parameters: int
    set: list[str] = Field(description="the fields of this run in the syntax of --set; empty: none, or no value fits")
    note: str | None
    estimate: FitSized | None


class FitCard(Block):
    """Memory of the run on one GPU."""

    name: str
    device_bytes: int = Field(description="a lower bound where bounds decide")
    usable_bytes: int
    verdict: Answer
    fits: bool | None
    lacks: str | None = Field(description="why this run is invalid on the GPU, regardless of memory")


class FitRecompute(Block):
    """The least recomputation that fits."""

    plan: str | list[Any]
    layers: int = Field(description="recomputed layers of each stage, or of each of its chunks")
    of: int
    device_bytes: int


class FitOffer(Block):
    """A type of GPU at the user's price."""

    name: str
    price_per_hour: float = Field(description="the given price of one GPU for one hour")
    verdict: Answer = Field(description="whether some layout over some number of these GPUs fits")
    lacks: str | None = Field(description="why this run is invalid on the GPU, regardless of memory")
    may_be_fewer: bool = Field(description="whether some layout over fewer GPUs may fit")
    gpus: int | None = Field(
        description="number of GPUs on which a token costs least; null: no number that was tried is enough"
    )
    all_per_hour: float | None = Field(description="price of all GPUs")
    per_million_tokens: float | None = Field(description="cost at peak rates: it compares GPUs and forecasts no bill")
    layout: FitLayout | None = Field(description="the cheapest layout over these GPUs")


class FitMinima(Block):
    """Results of --minimize; null if nothing fits."""

    gpus: int | None = None
    may_be_fewer: bool = Field(default=False, description="whether some layout over fewer GPUs may fit")
    gpu_kind: str | None = None
    cards: list[FitCard] | None = None
    cost: list[FitOffer] | None = Field(default=None, description="the GPU on which a token costs least comes first")
    recompute: FitRecompute | None = None
    all_recomputed: FitSized | None = Field(
        default=None, description="the run with every layer recomputed, where that is not enough: `nearest` changes it"
    )


class FitNearest(Block):
    """A change, or a pair of them, that makes the run fit."""

    levers: list[str]
    set: list[str] = Field(description="the change in the syntax of --set; hardware.gpu in place of --gpu")
    cost: str
    card_time_per_token: float | None = Field(description="1: unchanged; null: not known to the cost model")
    result: str = Field(description="effect on the training result")
    device_bytes: int
    host_bytes: int = Field(description="host memory of a rank")
    node_host_bytes: int = Field(description="host memory of all ranks of a node")


class FitRemedy(Block):
    """The cheapest single change that makes a run fit and keeps the result of training."""

    set: list[str]
    device_bytes: int
    cost: str
    host_bytes: int
    node_host_bytes: int


class FitReason(Block):
    """The reason for the peak of the run that does not fit."""

    phase: str
    largest: dict[str, int] = Field(description="the largest components at the peak")
    optimizer_lists: int = Field(description="temporaries of the optimizer's foreach update, if they are large")
    fragmented: int = Field(description="reserved and not allocated, if that alone makes the run too large")
    remedy: FitRemedy | None


class FitPruned(Block):
    """Layouts that a rule excludes."""

    choice: str | None
    reason: str
    times: int


class FitTerm(Block):
    """A term of the cost."""

    meaning: str
    source: str


class FitWritten(Block):
    """A layout as another program's file."""

    file: str
    settings: list[str] = Field(description="options that complete the file, in the syntax of --set")
    command: str = Field(description="command that estimates the layout from the file and the settings")


class FitDocument(Block):
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
    as_it_is: FitSized | None = Field(description="null: not_as_it_is says why")
    not_as_it_is: str | None
    layouts: FitLayouts | None = Field(description="null: not requested")
    maxima_of: FitLayout | None
    maxima: dict[str, FitMaximum]
    minima: FitMinima
    nearest: list[FitNearest]
    reason: FitReason | None = Field(description="if not even the smallest value fits, or no change helps")
    written: FitWritten | None = Field(description="null: --write was not given, or nothing fits")
    notes: list[str]
    pruned: list[FitPruned]
    cost_terms: dict[str, FitTerm]
