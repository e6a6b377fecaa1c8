"""Pydantic models of the JSON of a dry run, for the shipped JSON Schema and for tests."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from memcalc.ledger.schema import AssumptionRow, Gpu, LimitRow, OutsideAllocated
from memcalc.ledger.verdict import Answer
from memcalc.spec.model import Block


class CardPeak(Block):
    """The GPU with the highest peak."""

    phase: None = Field(description="null if the phases of the program are unknown")
    rank: dict[str, int] = Field(description="empty: the process is not one of several ranks")
    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    confidence: Literal["allocator"]


class CardUsage(Block):
    """One GPU of one process, at its peak."""

    device: int = Field(description="index of the GPU in its process")
    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    alloc_retries: int = Field(
        description="how often the allocator freed its cache and tried again (PyTorch: num_alloc_retries)"
    )
    ooms: int = Field(description="requests that failed")


class Line(Block):
    """A line of the program, and its live memory on a GPU at the peak."""

    device: int
    where: str
    bytes: int
    count: int


class Read(Block):
    """A line of the program that read unknown values."""

    where: str
    count: int


class Failure(Block):
    """The exception that ended a process."""

    type: str
    message: str


class ProcessReport(Block):
    """One process of the command that used a GPU."""

    pid: int
    rank: int | None
    arguments: list[str]
    torch: str
    steps: int
    failure: Failure | None
    reads: int = Field(description="copies from the device to the host")
    small_reads: int = Field(description="those of unknown values, small enough for a branch to depend on")
    masks: int = Field(
        description="unknown masks that elements were selected by; each is assumed to select all elements"
    )
    unknown_reads: list[Read] = Field(description="the lines of the program that made the small reads")
    choices: int = Field(
        description="tensors of indices that unknown scores chose, such as experts; these were assumed"
    )
    checkpoints: int = Field(description="files with tensors that it wrote; their weights are zeros")
    unmodelled: list[str] = Field(description="library functions that were called and rejected")
    cards: list[CardUsage]
    allocations: list[Line]


class DryRunDocument(Block):
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
    verdict: Answer | None = Field(description="null: nothing was measured")
    fits: bool | None
    headroom_bytes: int | None
    interval: None
    assumptions: list[AssumptionRow]
    limits: list[LimitRow]
    not_modelled: list[str]
    notes: list[str]
    command: list[str]
    gpus: int
    routing: Literal["balanced", "worst-case"] = Field(description="how unknown scores choose experts")
    outcome: str
    exit_code: int
    seconds: float
    would_fit: list[str]
    warnings: list[str]
    processes: list[ProcessReport]
