"""The document of `sweep`: one configuration of the grid after another."""

from __future__ import annotations

from typing import Any, Literal, cast

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from memcalc.documents.shared import SCHEMA_VERSION
from memcalc.sweeping.pareto_front import GrowthAxes
from memcalc.sweeping.table import Table
from memcalc.sweeping.verdict_terms import ANSWERS, SweepAnswer

_FITS: dict[str | None, bool] = {"fits": True, "does-not-fit": False}


class SweepAxis(TypedDict):
    """An axis: fields that change together, and their values at each step."""

    fields: list[str]
    """with their blocks: training.micro_batch_size"""
    values: list[list[Any]]


@with_config(ConfigDict(extra="allow", strict=True, use_attribute_docstrings=True))
class SweepConfiguration(TypedDict):
    """One configuration: the varied fields by their short names, then its sizes.

    In addition to the fields below it has `COMPONENT_bytes` for each component, at the peak, and `PHASE_bytes` for each
    phase; all are null if the configuration is invalid.
    """

    valid: bool
    fits: bool | None
    """null: close, no card, or the configuration is invalid"""
    verdict: SweepAnswer | None
    """close: neither bounds nor a replay decided; null: no card, or the configuration is invalid"""
    replayed: bool
    """whether an allocator replay gave reserved and device memory and the verdict"""
    on_front: bool
    """it fits or is close, and no larger configuration that differs only in sizes does"""
    peak_bytes: int | None
    peak_phase: str | None
    pipeline_stage: int | None
    reserved_bytes: int | None
    device_bytes: int | None
    headroom_bytes: int | None
    reason: str | None
    """why it is invalid, or not estimated"""


class SweepDocument(TypedDict):
    """Output of `sweep --format json`, and of --output to a .json file."""

    schema_version: Literal[2]
    source: Literal["sweep"]
    name: str
    axes: list[SweepAxis]
    configurations: list[SweepConfiguration]
    unmodelled: list[str]
    """features of some configurations that need memory and are not modelled; these never fit for certain"""
    notes: list[str]
    """how another framework's file was read, what of it is not counted or assumed"""


def sweep_document(table: Table, name: str, notes: tuple[str, ...] = ()) -> SweepDocument:
    """Return the document of a grid.

    Args:
        table: the grid with its figures.
        name: of the configuration that is varied.
        notes: how another framework's file was read.
    """
    found = columns(table)
    unmodelled = {what: None for terms in table.terms(table.valid) for what in terms.unmodelled}
    return {
        "schema_version": SCHEMA_VERSION,
        "source": "sweep",
        "name": name,
        "axes": [
            {"fields": list(axis.fields), "values": [list(step) for step in axis.values]} for axis in table.grid.axes
        ],
        "configurations": [
            cast("SweepConfiguration", dict(zip(found, row, strict=True))) for row in zip(*found.values(), strict=True)
        ],
        "unmodelled": list(unmodelled),
        "notes": list(notes),
    }


def columns(table: Table) -> dict[str, list[Any]]:
    """Return every column by its name; an entry is None where a configuration is invalid, or without a GPU."""
    valid = table.valid.tolist()
    judged = (table.valid & (table.usable_bytes >= 0)).tolist()
    points = [list(table.point(index).values()) for index in range(len(table))]
    found: dict[str, list[Any]] = {
        field.rpartition(".")[2]: [point[number] for point in points] for number, field in enumerate(table.grid.fields)
    }
    answers = [ANSWERS[number] if number >= 0 else None for number in table.verdict.tolist()]
    front = GrowthAxes(table).members().tolist()
    found |= {
        "valid": valid,
        "fits": [_FITS.get(answer) for answer in answers],
        "verdict": answers,
        "replayed": table.replayed.tolist(),
        "on_front": front,
        "peak_bytes": _kept(table.peak_bytes.tolist(), valid),
        "peak_phase": _kept([table.phases[phase] for phase in table.peak_phase.tolist()], valid),
        "pipeline_stage": _kept(table.pipeline_stage.tolist(), valid),
        "reserved_bytes": _kept(table.reserved_bytes.tolist(), valid),
        "device_bytes": _kept(table.device_bytes.tolist(), judged),
        "headroom_bytes": _kept((table.usable_bytes - table.device_bytes).tolist(), judged),
    }
    for number, component in enumerate(table.components):
        found[f"{component}_bytes"] = _kept(table.component_bytes[:, number].tolist(), valid)
    for number, phase in enumerate(table.phases):
        found[f"{phase}_bytes"] = _kept(table.phase_bytes[:, number].tolist(), valid)
    found["reason"] = [reason or None for reason in table.every_reason()]
    return found


def _kept(values: list[Any], valid: list[bool]) -> list[Any]:
    return [value if ok else None for value, ok in zip(values, valid, strict=True)]
