"""Pydantic models of the JSON of `recompute`: the source of its JSON Schema, and its check in tests."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from memcalc.ledger.schema import IntervalBytes, LimitRow
from memcalc.spec.model import Block
from memcalc.spec.spec import Spec


class RecomputePrice(Block):
    """Memory and cost of a plan."""

    peak_bytes: int
    moment: str = Field(description="phase of the peak")
    kept_bytes: int = Field(description="bytes saved from forward to backward")
    again_flops: int = Field(description="recomputed FLOPs")


class RecomputePoint(RecomputePrice):
    """A plan of the Pareto front: less memory costs more."""

    recompute: str | list[Any]


class RecomputeFramework(RecomputePrice):
    """The plan in a framework's syntax, as close as it allows."""

    lines: list[str]
    difference: str


class RecomputeBatches(Block):
    """The largest micro-batches that fit, and when the larger one has the higher throughput."""

    replayed: bool = Field(description="whether both, and the next larger ones, were replayed; else they are estimates")
    without: int
    with_: int = Field(alias="with")
    slow_down: float = Field(description="how much longer a step takes per sequence, by FLOPs")
    pays_below_share_of_rate: float | None = Field(
        description="share of the GPU's peak rate at the smaller micro-batch below which the larger pays; null: never"
    )


class RecomputeOffload(Block):
    """Offload of activations to host memory within the same budget."""

    host_bytes_per_rank: int | None = Field(description="held in host memory")
    host_bytes_per_node: int | None = Field(description="by all ranks of a node")
    bytes_per_second: float
    step_seconds: float
    enough: bool
    freed_bytes: int | None
    layers: list[int] | None
    waited_seconds: float | None


class RecomputeVerified(Block):
    """A phase of the planned step, and of its trace on an emulated device. Bytes."""

    device: str
    phase: str
    planned: int
    traced: int


class RecomputeReserved(Block):
    """Reserved memory of the planned step, from the replay and from an emulated device. Bytes."""

    device: str
    planned: int
    traced: int


class RecomputeDocument(Block):
    """The document that `recompute --format json` prints."""

    schema_version: Literal[2]
    source: Literal["recompute"]
    name: str
    spec: Spec
    verdict: Literal["fits", "unknown"] = Field(description="of the run with the plan")
    fits: bool | None
    limit_bytes: int = Field(description="of a GPU: its usable memory, or the budget")
    least_bytes: int = Field(description="lower bound of device memory")
    device_bytes: int | None = Field(description="of the run with the plan; null without a GPU")
    reserved_bytes: int | None
    interval: IntervalBytes | None
    budget_bytes: int = Field(description="allocated memory that fits; no cheaper plan within it was found")
    strategy: str
    recompute: str | list[Any] = Field(description="for training.recompute; a nested list is one checkpoint segment")
    recompute_keep: list[str]
    peak_bytes: int = Field(description="allocated by the plan, after the allocator replay")
    rests_bytes: int = Field(
        description="unsplit remainders of blocks in peak_bytes, which before, rules and front leave out"
    )
    peak_phase: str
    kept_bytes: int
    forward_flops: int
    again_flops: int
    may_save_at_most_flops: int | float
    before: RecomputePrice
    rules: dict[str, RecomputePrice]
    front: list[RecomputePoint]
    largest_micro_batch: RecomputeBatches | None
    offload: RecomputeOffload | None = Field(description="null: not computed")
    blocks: list[dict[str, Any]] = Field(description="the chain that was planned, block by block")
    frameworks: dict[str, RecomputeFramework]
    verified: list[RecomputeVerified]
    verified_reserved: list[RecomputeReserved]
    limits: list[LimitRow]
    not_modelled: list[str]
