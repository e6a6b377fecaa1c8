"""Pydantic models of the JSON of `check`: they produce its JSON Schema and check the output in tests."""

from __future__ import annotations

from pydantic import Field

from memcalc.checking.report import Status
from memcalc.spec.model import Block


class Change(Block):
    """A peak and its change from the baseline."""

    baseline_bytes: int
    difference_bytes: int
    allowed_bytes: int | None = Field(description="null: any growth")


class CheckedInterval(Block):
    """Interval of device memory from recorded runs."""

    low_bytes: int
    high_bytes: int


class CheckedConfig(Block):
    """One config: checked, or invalid with a message and without sizes."""

    path: str
    status: Status
    name: str | None
    gpu: str | None = Field(description="the GPU of the verdict, by its name in `memcalc gpus`")
    needed_bytes: int | None = Field(description="device bytes if a GPU is known, else reserved, else allocated")
    basis: str | None = Field(description="which of the three: device, reserved, allocated")
    is_bound: bool = Field(description="whether needed_bytes is a lower bound, which alone is beyond the limit")
    interval: CheckedInterval | None = Field(description="null if bounds decided")
    not_modelled: list[str] = Field(description="features of the run that need memory and are not modelled")
    limit_bytes: int | None = Field(description="the smaller of GPU and budget, less the margin")
    limit: str | None = Field(description="what sets the limit, as text")
    margin_bytes: int | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    device_bytes: int | None
    peak_phase: str | None
    rank: dict[str, int] | None
    change: Change | None = Field(description="null: no baseline, or none of this configuration")
    message: str | None = Field(description="what is wrong with an invalid configuration")
    line: int | None = Field(description="where in the file, if that is known")
    notes: list[str] = Field(description="how another framework's file was read, what of it is not counted or assumed")


class CheckDocument(Block):
    """Output of `memcalc check --format json`, and input of --baseline."""

    schema_version: int
    exit_code: int
    budget_bytes: int | None = Field(description="--budget, the limit of all configurations")
    skipped: int = Field(description="files that are not configurations")
    configs: list[CheckedConfig]
    gone: list[str] = Field(description="configurations of the baseline that were not checked")
    remarks: list[str] = Field(description="links to directories that were not followed, rules that match nothing")
