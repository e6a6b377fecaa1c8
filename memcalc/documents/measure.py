"""The documents of `measure`: of one run, of a suite of runs, and of records that are compared with traces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NotRequired, cast

from typing_extensions import TypedDict

from memcalc.documents.result import Document, document
from memcalc.documents.shared import filled
from memcalc.validation.predicted_vs_measured import PredictedVsMeasured
from memcalc.validation.record_comparison import RecordComparison, operator_differences, run_of
from memcalc.validation.suite import SuiteOutcome
from memcalc.validation.summary import PredictedRecord, PredictionErrors, errors_of, summary


class ComparedDocument(Document):
    """The document that `measure --format json` prints: the measured result and its predictions."""

    estimate: NotRequired[Document]
    """from formulas; missing if there are none"""
    traces: list[Document]
    """on fake tensors or the null CUDA device"""
    measurement: dict[str, Any]
    """figures of the device, as recorded"""
    ranks: NotRequired[list[dict[str, Any]]]
    """the same for every rank; missing if there is one"""


class ErrorRow(TypedDict):
    """Signed errors of a prediction, as shares of the measured total or, for a component, of the peak of the run."""

    name: str
    runs: int
    median: float
    p95: float
    """of the absolute errors"""
    worst: float
    under: float
    """fraction of runs that used more memory than predicted"""
    exact: float
    """fraction of runs that were predicted byte-exactly"""


class LargestRow(TypedDict):
    """A search for the largest micro-batch."""

    run: str
    predicted: int | None
    found: int | None


class UnfinishedRun(TypedDict):
    """A run without a result."""

    run: str
    reason: str


class SuiteDocument(TypedDict):
    """The document that `measure --suite --format json` prints."""

    runs: int
    """on record"""
    out_of_memory: int
    measured_now: int
    errors: list[ErrorRow]
    """of the estimates"""
    largest_batch: list[LargestRow]
    not_measured: list[UnfinishedRun]


class Miss(TypedDict):
    """A run with another peak than its trace."""

    run: str
    bytes: int
    """traced minus measured"""
    operators: dict[str, int]
    """the same by the operators that allocate"""


class OutOfMemoryRuns(TypedDict):
    """Runs that ran out of memory."""

    said: int
    """how many of them the trace reports"""
    were: int


class TracedRecords(TypedDict):
    """Traces of one kind, compared with the records."""

    trace: str
    """fake or null"""
    errors: list[ErrorRow]
    misses: list[Miss]
    out_of_memory: OutOfMemoryRuns


class RecordsDocument(TypedDict):
    """The document that `measure --compare RECORDS --format json` prints."""

    records: int
    traced_now: int
    errors: list[ErrorRow]
    """of the estimates"""
    traces: list[TracedRecords]
    not_traced: list[UnfinishedRun]


def measured_document(found: PredictedVsMeasured, ranks: Sequence[dict[str, Any]] = ()) -> ComparedDocument:
    """Return the document of a measured run.

    Args:
        found: the run with its predictions.
        ranks: records of all ranks, if there are several.
    """
    content = cast("ComparedDocument", document(found.measurement.result))
    if found.estimate is not None:
        content["estimate"] = document(found.estimate)
    content["traces"] = [document(result) for result in found.traces]
    content["measurement"] = found.measurement.to_record()
    if ranks:
        content["ranks"] = list(ranks)
    return content


def suite_document(outcome: SuiteOutcome) -> SuiteDocument:
    """Return the document of a suite of measured runs."""
    return {
        "runs": len(outcome.records),
        "out_of_memory": sum(record["outcome"] != "done" for record in outcome.records),
        "measured_now": outcome.fresh,
        "errors": _errors(summary(outcome.records)),
        "largest_batch": [
            {"run": search.overrides, "predicted": search.predicted, "found": search.found}
            for search in outcome.largest
        ],
        "not_measured": [{"run": words, "reason": why} for words, why in outcome.refused],
    }


def records_document(compared: RecordComparison) -> RecordsDocument:
    """Return the document of traces that are compared with records."""
    return {
        "records": len(compared.records),
        "traced_now": compared.fresh,
        "errors": _errors(summary(compared.records)),
        "traces": [_traced(compared, trace) for trace in compared.traces],
        "not_traced": [{"run": words, "reason": why} for words, why in compared.missing],
    }


def missed(runs: Sequence[PredictedRecord]) -> list[PredictedRecord]:
    """Return the runs with another peak than predicted."""
    return [run for run in runs if off_by(run)]


def off_by(run: PredictedRecord) -> int:
    """Return the predicted peak minus the measured one, in bytes."""
    return run.predicted.ledger.peak_bytes - run.measured.ledger.peak_bytes


def _traced(compared: RecordComparison, trace: str) -> TracedRecords:
    runs = compared.of(trace)
    said, were = compared.predicted_failures(trace)
    return {
        "trace": trace,
        "errors": _errors(errors_of(runs)),
        "misses": [
            {"run": run_of(run.record), "bytes": off_by(run), "operators": dict(operator_differences(run))}
            for run in missed(runs)
        ],
        "out_of_memory": {"said": said, "were": were},
    }


def _errors(errors: Sequence[PredictionErrors]) -> list[ErrorRow]:
    return [filled(ErrorRow, each, runs=len(each.shares)) for each in errors]
