"""The document of `sweep --by trace|null|dry-run`."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import TypedDict

from memcalc.cells.cell import By, GridCells, Outcome
from memcalc.documents.shared import SCHEMA_VERSION, filled
from memcalc.ledger.verdict import Answer


class CellRow(TypedDict):
    """One cell. Bytes of the GPU with the highest peak; null where nothing was measured."""

    values: dict[str, Any]
    """of each varied field"""
    outcome: Outcome
    """invalid: the configuration is; failed: the program did; lost: its process was killed"""
    verdict: Answer | None
    """null: no GPU was named, or nothing was measured"""
    allocated_bytes: int | None
    reserved_bytes: int | None
    device_bytes: int | None
    """reserved, the context and the communication library"""
    headroom_bytes: int | None
    peak_phase: str | None
    """null in a dry run"""
    seconds: float
    """that the run took"""
    reason: str
    """why there are no figures, or not all"""


class CellsDocument(TypedDict):
    """Output of `sweep --by trace`, `null` or `dry-run`, and of --output to a .json file."""

    schema_version: Literal[2]
    source: Literal["sweep"]
    by: By
    name: str
    fields: list[str]
    cells: list[CellRow]


def cells_document(cells: GridCells) -> CellsDocument:
    """Return the document of a sweep; all its cells have an answer."""
    return {
        "schema_version": SCHEMA_VERSION,
        "source": "sweep",
        "by": cells.by,
        "name": cells.name,
        "fields": list(cells.fields),
        "cells": [filled(CellRow, cell.answer, values=dict(cell.values)) for cell in cells.cells],
    }
