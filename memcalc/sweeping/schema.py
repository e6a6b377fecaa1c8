"""Pydantic models of the JSON of `sweep`: they produce its JSON Schema and check the output in tests."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from memcalc.spec.model import Block
from memcalc.sweeping.terms import SweepAnswer


class SweepAxis(Block):
    """An axis: fields that change together, and their values at each step."""

    fields: list[str] = Field(description='with their blocks, as "training.micro_batch_size"')
    values: list[list[Any]]


class SweepConfiguration(Block):
    """One configuration: the varied fields by their short names, then its sizes.

    In addition to the fields below it has `COMPONENT_bytes` for each component, at the peak, and `PHASE_bytes` for each
    phase; all are null if the configuration is invalid.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="allow")

    valid: bool
    fits: bool | None = Field(description="null: close, no card, or the configuration is invalid")
    verdict: SweepAnswer | None = Field(
        description="close: neither bounds nor a replay decided; null: no card, or the configuration is invalid"
    )
    replayed: bool = Field(description="whether an allocator replay gave reserved and device memory and the verdict")
    on_front: bool = Field(
        description="it fits or is close, and no larger configuration that differs only in sizes does"
    )
    peak_bytes: int | None
    peak_phase: str | None
    pipeline_stage: int | None
    reserved_bytes: int | None
    device_bytes: int | None
    headroom_bytes: int | None
    reason: str | None = Field(description="why it is invalid, or not estimated")


class SweepDocument(Block):
    """Output of `sweep --format json`, and of --output to a .json file."""

    schema_version: Literal[2]
    source: Literal["sweep"]
    name: str
    axes: list[SweepAxis]
    configurations: list[SweepConfiguration]
    unmodelled: list[str] = Field(
        description="features of some configurations that need memory and are not modelled; these never fit for certain"
    )
    notes: list[str] = Field(description="how another framework's file was read, what of it is not counted or assumed")
