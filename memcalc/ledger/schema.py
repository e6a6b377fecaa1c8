"""Pydantic models of the JSON document: the source of its JSON Schema, and its check in tests.

Separate from `document.py`, so that printing a result does not pay for building these models.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from memcalc.ledger.result import Confidence, Source
from memcalc.ledger.verdict import Answer
from memcalc.spec.model import Block
from memcalc.spec.spec import Spec


class ModelCounts(Block):
    """Numbers of elements, not bytes."""

    parameters: int = Field(description="nn.Parameters, tied ones once")
    trainable_parameters: int
    buffer_elements: int = Field(description="router biases (e_score_correction_bias) and RoPE cos/sin caches")


class TextbookFigures(Block):
    """The published closed-form estimates for one unsharded GPU."""

    parameters: int = Field(description="l(12d^2+13d)+Vd")
    model_state_bytes: int = Field(description="20 (16, 18) bytes per parameter")
    activation_bytes: int = Field(description="l(34bsd+5bs^2h)")


class Peak(Block):
    """The peak of the rank that needs the most memory."""

    phase: str
    rank: dict[str, int]
    allocated_bytes: int
    reserved_bytes: int | None
    device_bytes: int | None
    confidence: Confidence


class OutsideAllocated(Block):
    """Device memory outside the blocks that PyTorch has allocated."""

    cached_segments: int
    device_context: int
    communication_library: int


class Phase(Block):
    """The peak of one phase; components sum to allocated_bytes exactly."""

    phase: str
    allocated_bytes: int
    components: dict[str, int]


class LedgerRow(Block):
    """Identical tensors on the headline rank; bytes are the sum over all `count` tensors."""

    component: str
    module: str
    tensor: str
    shape: list[int]
    dtype: str
    count: int
    bytes: int
    phases: list[str]
    formula: str
    citation: str


class Gpu(Block):
    """The GPU that the verdict refers to."""

    name: str
    advertised_bytes: int
    usable_bytes: int


class IntervalBytes(Block):
    """The expected range of device memory, from the errors of recorded runs of one kind."""

    low_bytes: int
    high_bytes: int
    runs: int = Field(description="recorded runs; 0: none of this kind, so an error of 10 % on both sides is assumed")
    kind: str
    replayed: bool = Field(description="whether the allocator was replayed: the central 95 % of errors, else all")
    median_error: float = Field(description="absolute, as a fraction of reserved memory")
    worst_error: float


class LimitRow(Block):
    """Memory or a feature that the figures omit."""

    what: str
    holds_memory: bool = Field(description="the run uses it and it needs GPU memory, so the figures are lower bounds")
    at_least_bytes: int


class AssumptionRow(Block):
    """A value that the config, command line and framework leave open; the one with the largest peak is assumed."""

    field: str = Field(description="field of memcalc that settles it")
    what: str
    taken: str
    otherwise: str = Field(description="the candidate with the smallest peak")
    moved_bytes: int = Field(description="difference of its allocated peak per GPU")


class Host(Block):
    """Peak host memory of the headline rank."""

    phase: str
    bytes: int
    components: dict[str, int]
    ledger: list[LedgerRow]


class LargestFit(Block):
    """The largest batch and context that fit the GPU, one at a time."""

    batch_size: int = Field(description="with the context of the run; 0: not even 1 fits")
    context_length: int = Field(description="with its batch, and as many new tokens; 0: not even one token of prompt")
    all_positions: bool = Field(description="whether the context ends where the model's positions do")


class KvCache(Block):
    """Size of the KV cache: bytes of one sequence, over all layers, on one tensor-parallel rank."""

    bytes_per_token: int
    bytes_per_sequence: int = Field(description="at the end of its context, in whole blocks")
    largest: LargestFit | None


class Document(Block):
    """The document that `--format json` prints."""

    schema_version: Literal[2]
    source: Source
    device: str | None
    name: str
    spec: Spec | None = Field(description="null for a module, which has no configuration")
    model: ModelCounts
    textbook: TextbookFigures | None = Field(description="null for models that the published formulas do not describe")
    peak: Peak
    components: dict[str, int] = Field(description="bytes at the peak; their sum is peak.allocated_bytes")
    outside_allocated: OutsideAllocated
    phases: list[Phase]
    ledger: list[LedgerRow]
    gpu: Gpu | None
    verdict: Answer | None = Field(description="null without a GPU")
    fits: bool | None = Field(description="null without a GPU, and where the verdict is unknown")
    headroom_bytes: int | None = Field(description="usable GPU memory less the best estimate of device memory")
    interval: IntervalBytes | None = Field(description="null without a GPU, and where the run itself was traced")
    limits: list[LimitRow] = Field(description="what the figures leave out")
    not_modelled: list[str]
    assumptions: list[AssumptionRow] = Field(description="what the file leaves open, the largest difference first")
    notes: list[str] = Field(description="how another framework's file was read, and which of its fields were not")
    host: Host | None = Field(None, description="missing if the run needs no host memory")
    kv_cache: KvCache | None = Field(None, description="of inference only")


class ComparedDocument(Document):
    """The document that `measure --format json` prints: the measured result and its predictions."""

    estimate: Document | None = Field(None, description="from formulas; missing if there are none")
    traces: list[Document] = Field(description="on fake tensors or the null CUDA device")
    measurement: dict[str, Any] = Field(description="figures of the device, as recorded")
    ranks: list[dict[str, Any]] | None = Field(None, description="the same for every rank; missing if there is one")
