"""The documents of `dry-run`: of one run, and of several micro-batch sizes."""

from __future__ import annotations

import shlex
from typing import Literal, cast

from typing_extensions import TypedDict

from memcalc.documents.result import AssumptionRow
from memcalc.documents.shared import SCHEMA_VERSION, Gpu, LimitRow, OutsideAllocated, filled, limit_row
from memcalc.ledger.verdict import Answer
from memcalc.nullcuda.result import NOT_MODELLED, DryRun, PythonProcess, Usage
from memcalc.nullcuda.sweep import Sweep
from memcalc.spec.limits import Limit
from memcalc.text import masked

Routing = Literal["balanced", "worst-case"]


class CardPeak(TypedDict):
    """The GPU with the highest peak."""

    phase: None
    """null if the phases of the program are unknown"""
    rank: dict[str, int]
    """empty: the process is not one of several ranks"""
    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    confidence: Literal["allocator"]


class CardUsage(TypedDict):
    """One GPU of one process, at its peak."""

    device: int
    """index of the GPU in its process"""
    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    alloc_retries: int
    """how often the allocator freed its cache and tried again (PyTorch: num_alloc_retries)"""
    ooms: int
    """requests that failed"""


class Line(TypedDict):
    """A line of the program, and its live memory on a GPU at the peak."""

    device: int
    where: str
    bytes: int
    count: int


class Read(TypedDict):
    """A line of the program that read unknown values."""

    where: str
    count: int


class Failure(TypedDict):
    """The exception that ended a process."""

    type: str
    message: str


class ProcessReport(TypedDict):
    """One process of the command that used a GPU."""

    pid: int
    rank: int | None
    arguments: list[str]
    torch: str
    steps: int
    failure: Failure | None
    reads: int
    """copies from the device to the host"""
    small_reads: int
    """those of unknown values, small enough for a branch to depend on"""
    masks: int
    """unknown masks that elements were selected by; each is assumed to select all elements"""
    unknown_reads: list[Read]
    """the lines of the program that made the small reads"""
    choices: int
    """tensors of indices that unknown scores chose, such as experts; these were assumed"""
    checkpoints: int
    """files with tensors that it wrote; their weights are zeros"""
    unmodelled: list[str]
    """library functions that were called and rejected"""
    cards: list[CardUsage]
    allocations: list[Line]


class DryRunDocument(TypedDict):
    """Output of `dry-run --format json`: fields that describe a model are null, and processes are added."""

    schema_version: Literal[2]
    source: Literal["dry-run"]
    device: str
    name: str
    spec: None
    model: None
    textbook: None
    peak: CardPeak | None
    components: None
    outside_allocated: OutsideAllocated | None
    phases: None
    ledger: None
    gpu: Gpu
    verdict: Answer | None
    """null: nothing was measured"""
    fits: bool | None
    headroom_bytes: int | None
    interval: None
    assumptions: list[AssumptionRow]
    limits: list[LimitRow]
    not_modelled: list[str]
    notes: list[str]
    command: list[str]
    gpus: int
    routing: Routing
    """how unknown scores choose experts"""
    outcome: str
    exit_code: int
    seconds: float
    would_fit: list[str]
    warnings: list[str]
    processes: list[ProcessReport]


class DryRunSize(TypedDict):
    """The dry run of one micro-batch size."""

    micro_batch_size: int
    result: DryRunDocument


class DryRunSweepDocument(TypedDict):
    """Output of `dry-run --sweep --format json`."""

    schema_version: Literal[2]
    source: Literal["dry-run-sweep"]
    micro_batch_flag: str
    """the option of the program that sets the size"""
    largest_micro_batch_size: int | None
    """that fits; null: none that was tried"""
    runs: list[DryRunSize]


def dry_run_sweep_document(found: Sweep) -> DryRunSweepDocument:
    """Return the document of several sizes, with that of each run."""
    return {
        "schema_version": SCHEMA_VERSION,
        "source": "dry-run-sweep",
        "micro_batch_flag": found.flag,
        "largest_micro_batch_size": found.largest,
        "runs": [{"micro_batch_size": size, "result": dry_run_document(run)} for size, run in found.runs],
    }


def dry_run_document(run: DryRun) -> DryRunDocument:
    """Return the document of a dry run, with the keys of an estimate where they apply, and its processes."""
    peak = run.peak
    return {
        "schema_version": SCHEMA_VERSION,
        "source": "dry-run",
        "device": f"null:{run.gpu.name}",
        "name": shlex.join(masked(run.command)),
        "spec": None,
        "model": None,
        "textbook": None,
        "peak": None if peak is None else _peak(peak),
        "components": None,
        "outside_allocated": None if peak is None else _outside(run, peak),
        "phases": None,
        "ledger": None,
        "gpu": filled(Gpu, run.gpu),
        "verdict": run.answer,
        "fits": run.fits,
        "headroom_bytes": run.headroom_bytes,
        "interval": None,  # the allocator's figures are known
        "assumptions": [],  # the command is run unmodified
        "limits": [limit_row(Limit(what, holds_memory=False)) for what in NOT_MODELLED],
        "not_modelled": list(NOT_MODELLED),
        "notes": [],
        "command": masked(run.command),
        "gpus": run.gpus,
        "routing": cast("Routing", run.routing),
        "outcome": run.outcome,
        "exit_code": run.exit_code,
        "seconds": round(run.seconds, 3),
        "would_fit": [gpu.name for gpu in run.would_fit],
        "warnings": list(run.warnings),
        "processes": [_process(process) for process in run.processes],
    }


def _peak(usage: Usage) -> CardPeak:
    rank = {} if usage.rank is None else {"rank": usage.rank}
    return filled(CardPeak, usage, phase=None, rank=rank, confidence="allocator")


def _outside(run: DryRun, usage: Usage) -> OutsideAllocated:
    return {
        "cached_segments": usage.reserved_bytes - usage.allocated_bytes,
        "device_context": run.gpu.context_bytes,
        "communication_library": usage.communication_bytes,
    }


def _process(process: PythonProcess) -> ProcessReport:
    failure = process.failure
    return filled(
        ProcessReport,
        process,
        pid=process.number,
        arguments=masked(process.arguments),
        failure=None if failure is None else {"type": failure[0], "message": failure[1]},
        unknown_reads=[filled(Read, read, where=read.location) for read in process.unknown_reads],
        cards=[filled(CardUsage, usage, alloc_retries=usage.retries) for usage in process.usages],
        allocations=[filled(Line, line, where=line.location) for line in process.allocations],
    )
