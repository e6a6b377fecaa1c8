"""Pydantic models of the JSON of `sweep --by trace|null|dry-run`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from memcalc.ledger.verdict import Answer
from memcalc.spec.model import Block


class CellRow(Block):
    """One cell. Bytes of the GPU with the highest peak; null where nothing was measured."""

    values: dict[str, Any] = Field(description="of each varied field")
    outcome: Literal["measured", "invalid", "failed", "lost"] = Field(
        description="invalid: the configuration is; failed: the program did; lost: its process was killed"
    )
    verdict: Answer | None = Field(description="null: no GPU was named, or nothing was measured")
    allocated_bytes: int | None
    reserved_bytes: int | None
    device_bytes: int | None = Field(description="reserved, the context and the communication library")
    headroom_bytes: int | None
    peak_phase: str | None = Field(description="null in a dry run")
    seconds: float = Field(description="that the run took")
    reason: str = Field(description="why there are no figures, or not all")


class CellsDocument(Block):
    """Output of `sweep --by trace`, `null` or `dry-run`, and of --output to a .json file."""

    schema_version: Literal[2]
    source: Literal["sweep"]
    by: Literal["trace", "null", "dry-run"]
    name: str
    fields: list[str]
    cells: list[CellRow]
