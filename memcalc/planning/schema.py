"""The JSON of `recompute` described as Pydantic models: they give its JSON Schema and check it in tests."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from memcalc.spec.model import Block
from memcalc.spec.spec import Spec


class RecomputePrice(Block):
    """What a plan needs and costs."""

    peak_bytes: int
    moment: str = Field(description="of the peak")
    kept_bytes: int = Field(description="from forward to backward")
    again_flops: int = Field(description="of the forwards that run again")


class RecomputePoint(RecomputePrice):
    """A plan of the front: less memory costs more."""

    recompute: str | list[Any]


class RecomputeFramework(RecomputePrice):
    """The plan in a framework's words, as near as it can say it."""

    lines: list[str]
    difference: str


class RecomputeBatches(Block):
    """The largest micro-batches that fit, and when the larger one pays."""

    without: int
    with_: int = Field(alias="with")
    slow_down: float = Field(description="of a sequence's step, by FLOPs")
    pays_below_share_of_rate: float | None = Field(description="of the card's rate at the smaller one; null: never")


class RecomputeOffload(Block):
    """Activations on the host instead, for the same budget."""

    bytes_per_second: float
    step_seconds: float
    enough: bool
    freed_bytes: int | None
    layers: list[int] | None
    waited_seconds: float | None


class RecomputeVerified(Block):
    """A phase of the plan beside the step on a device that is not there. Bytes."""

    device: str
    phase: str
    planned: int
    traced: int


class RecomputeDocument(Block):
    """What `recompute --format json` prints."""

    schema_version: Literal[1]
    source: Literal["recompute"]
    name: str
    spec: Spec
    limit_bytes: int | None
    budget_bytes: int | None
    strategy: str
    recompute: str | list[Any] = Field(description="for training.recompute; lists in it run again together")
    recompute_keep: list[str]
    peak_bytes: int = Field(description="of the plan, rehearsed with PyTorch's allocator")
    rests_bytes: int = Field(description="of that: beside the formulas, by which before, rules and front are compared")
    peak_phase: str
    kept_bytes: int
    forward_flops: int
    again_flops: int
    may_save_at_most_flops: int | float
    before: RecomputePrice
    rules: dict[str, RecomputePrice]
    front: list[RecomputePoint]
    largest_micro_batch: RecomputeBatches | None
    offload: RecomputeOffload | None = Field(description="null: it was not looked at")
    blocks: list[dict[str, Any]] = Field(description="the chain that was planned, block by block")
    frameworks: dict[str, RecomputeFramework]
    verified: list[RecomputeVerified]
    not_modelled: list[str]
