"""Pydantic models of the timeline's JSON document: the source of its JSON Schema, and its check in tests."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from memcalc.ledger.result import Source
from memcalc.spec.model import Block


class TimelinePeak(Block):
    """The peak of allocated memory."""

    event: int = Field(description="its position in the run, from 0; -1 if the run has no events")
    phase: str
    allocated_bytes: int
    reserved_bytes: int | None = Field(description="the most over the whole run; null where no allocator is known")


class TimelinePhase(Block):
    """A phase of the run: events `begin` to `end` (exclusive)."""

    phase: str
    begin: int
    end: int


class TimelinePoints(Block):
    """The curve as lists of equal length. A point is the peak of the events from its begin to the next begin."""

    begin: list[int]
    event: list[int] = Field(description="the point of its peak")
    allocated_bytes: list[int]
    reserved_bytes: list[int] | None = Field(description="the most among the point's events")
    component_bytes: dict[str, list[int]] = Field(description="at that event; they sum to allocated_bytes")


class TimelineDocument(Block):
    """The document that `--plot FILE.json` writes: memory over three training steps, or over a recorded run."""

    schema_version: Literal[1]
    source: Source
    name: str
    events: int = Field(description="number of allocations, frees and phase starts")
    completed: bool = Field(description="false where the run ran out of memory")
    limit_bytes: int | None = Field(description="GPU memory that is available to the allocator")
    peak: TimelinePeak
    phases: list[TimelinePhase]
    points: TimelinePoints
