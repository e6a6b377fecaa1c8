"""The document of a result: one shape for estimate, trace, dry-run and measure (schema_version 2)."""

from __future__ import annotations

from typing import Literal, NotRequired, cast

from typing_extensions import TypedDict

from memcalc.documents.shared import (
    SCHEMA_VERSION,
    Gpu,
    IntervalBytes,
    LimitRow,
    OutsideAllocated,
    SpecDocument,
    by_name,
    filled,
    interval,
    limit_row,
)
from memcalc.ledger.ledger import Ledger
from memcalc.ledger.result import Confidence, Generation, ModuleResult, Result, Source
from memcalc.ledger.row import Row
from memcalc.ledger.verdict import Answer


class ModelCounts(TypedDict):
    """Numbers of elements, not bytes."""

    parameters: int
    """nn.Parameters, tied ones once"""
    trainable_parameters: int
    buffer_elements: int
    """router biases (e_score_correction_bias) and RoPE cos/sin caches"""


class TextbookFigures(TypedDict):
    """The published closed-form estimates for one unsharded GPU."""

    parameters: int
    """l(12d^2+13d)+Vd"""
    model_state_bytes: int
    """20 (16, 18) bytes per parameter"""
    activation_bytes: int
    """l(34bsd+5bs^2h)"""


class Peak(TypedDict):
    """The peak of the rank that needs the most memory."""

    phase: str
    rank: dict[str, int]
    allocated_bytes: int
    reserved_bytes: int | None
    device_bytes: int | None
    confidence: Confidence


class Phase(TypedDict):
    """The peak of one phase; components sum to allocated_bytes exactly."""

    phase: str
    allocated_bytes: int
    components: dict[str, int]


class LedgerRow(TypedDict):
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


class AssumptionRow(TypedDict):
    """A value that the config, command line and framework leave open; the one with the largest peak is assumed."""

    field: str
    """field of memcalc that settles it"""
    what: str
    taken: str
    otherwise: str
    """the candidate with the smallest peak"""
    moved_bytes: int
    """difference of its allocated peak per GPU"""


class Host(TypedDict):
    """Peak host memory of the headline rank."""

    phase: str
    bytes: int
    components: dict[str, int]
    ledger: list[LedgerRow]


class LargestFit(TypedDict):
    """The largest batch and context that fit the GPU, one at a time."""

    batch_size: int
    """with the context of the run; 0: none fits"""
    context_length: int
    """with the batch and the new tokens of the run; 0: not even a prompt of one token fits"""
    all_positions: bool
    """whether the longest context has all positions of the model"""


class KvCache(TypedDict):
    """Size of the KV cache: bytes of one sequence, over all layers, on one tensor-parallel rank."""

    bytes_per_token: int
    bytes_per_sequence: int
    """at the end of its context, in whole blocks"""
    largest: LargestFit | None


class Document(TypedDict):
    """The document that `--format json` prints."""

    schema_version: Literal[2]
    source: Source
    device: str | None
    name: str
    spec: SpecDocument | None
    """null for a module, which has no configuration"""
    model: ModelCounts
    textbook: TextbookFigures | None
    """null for models that the published formulas do not describe"""
    peak: Peak
    components: dict[str, int]
    """bytes at the peak; their sum is peak.allocated_bytes"""
    outside_allocated: OutsideAllocated
    phases: list[Phase]
    ledger: list[LedgerRow]
    gpu: Gpu | None
    verdict: Answer | None
    """null without a GPU"""
    fits: bool | None
    """null without a GPU, and where the verdict is unknown"""
    headroom_bytes: int | None
    """usable GPU memory less the best estimate of device memory"""
    interval: IntervalBytes | None
    """null without a GPU, and where the run itself was traced"""
    limits: list[LimitRow]
    """features that the figures do not include"""
    not_modelled: list[str]
    assumptions: list[AssumptionRow]
    """values that the file does not set, the largest effect first"""
    notes: list[str]
    """how another framework's file was read, and which of its fields were not"""
    host: NotRequired[Host]
    """missing if the run needs no host memory"""
    kv_cache: NotRequired[KvCache]
    """inference only"""


class SourcesDocument(Document):
    """The document of `estimate --measure` and `trace --compare`: the same run, also from other sources."""

    estimate: NotRequired[Document]
    """from formulas"""
    fake: NotRequired[Document]
    """traced on fake tensors"""
    null: NotRequired[Document]
    """traced on the null CUDA device"""
    measured: NotRequired[Document]
    """measured on a device"""


def document(result: Result | ModuleResult) -> Document:
    """Return the document of a result; a module has no spec and no published formulas."""
    run = result.replayed if isinstance(result, Result) else None
    result = run or result
    ledger = result.ledger
    headline = result.headline
    found: Document = {
        "schema_version": SCHEMA_VERSION,
        "source": result.source,
        "device": result.device,
        "name": result.name,
        "spec": None if run is None else run.spec.model_dump(mode="json"),
        "model": filled(ModelCounts, result),
        "textbook": None if run is None or run.textbook is None else filled(TextbookFigures, run.textbook),
        "peak": {
            "phase": ledger.peak_phase,
            "rank": headline.rank,
            "allocated_bytes": ledger.peak_bytes,
            "reserved_bytes": headline.reserved_bytes,
            "device_bytes": headline.device_bytes,
            "confidence": result.confidence,
        },
        "components": by_name(ledger.components(ledger.peak_phase)),
        "outside_allocated": filled(OutsideAllocated, headline.outside),
        "phases": [
            {
                "phase": phase,
                "allocated_bytes": ledger.totals[phase],
                "components": by_name(ledger.components(phase)),
            }
            for phase in ledger.phases
        ],
        "ledger": [_row(row) for row in ledger.rows],
        "gpu": None if result.gpu is None else filled(Gpu, result.gpu),
        "verdict": result.verdict,
        "fits": result.fits,
        "headroom_bytes": result.headroom_bytes,
        "interval": interval(result.judgement),
        "limits": [limit_row(limit) for limit in result.limits],
        "not_modelled": list(result.not_modelled),
        "assumptions": []
        if run is None
        else [filled(AssumptionRow, each, what=each.choice) for each in run.spec.origin.assumptions],
        "notes": list(result.notes),
    }
    if headline.host is not None:
        found["host"] = _host(headline.host)
    if run is not None and run.generation is not None:
        found["kv_cache"] = _kv_cache(run.generation)
    return found


def document_with_sources(result: Result | ModuleResult, **sources: Result) -> SourcesDocument:
    """Return the document of a result, with that of the same run from other sources.

    Args:
        result: the run.
        sources: by their key: estimate, fake, null, measured.
    """
    others = {name: document(other) for name, other in sources.items()}
    return cast("SourcesDocument", {**document(result), **others})


def _kv_cache(found: Generation) -> KvCache:
    return filled(KvCache, found, largest=None if found.largest is None else filled(LargestFit, found.largest))


def _host(ledger: Ledger) -> Host:
    """Return the host memory of the headline rank at its peak."""
    phase = ledger.peak_phase
    return {
        "phase": phase,
        "bytes": ledger.peak_bytes,
        "components": by_name(ledger.components(phase)),
        "ledger": [_row(row) for row in ledger.rows],
    }


def _row(row: Row) -> LedgerRow:
    return filled(LedgerRow, row, component=row.component.value)
