"""The documents of `recompute`: of a run, and of a chain. Bytes and FLOPs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from memcalc.documents.shared import SCHEMA_VERSION, IntervalBytes, LimitRow, SpecDocument, interval, limit_row
from memcalc.ledger.verdict import Answer
from memcalc.recomputation import batch_gain
from memcalc.recomputation.chain_file import ChainPlanning
from memcalc.recomputation.evaluation import Evaluation
from memcalc.recomputation.recommendation import RecomputeResult
from memcalc.recomputation.verification import DeviceVerification
from memcalc.spec.recompute_plan import Segment


class RecomputePrice(TypedDict):
    """Memory and cost of a plan."""

    peak_bytes: int
    moment: str
    """phase of the peak"""
    kept_bytes: int
    """bytes saved from forward to backward"""
    again_flops: int
    """recomputed FLOPs"""


class RecomputePoint(RecomputePrice):
    """A plan of the Pareto front: less memory costs more."""

    recompute: str | list[Any]


class RecomputeFramework(RecomputePrice):
    """The plan in a framework's syntax, as close as it allows."""

    lines: list[str]
    difference: str


Gain = TypedDict(  # "with" is a keyword of Python
    "Gain",
    {
        "without": int,
        "with": int,
        "slow_down": Annotated[float, Field(description="how much longer a step takes per sequence, by FLOPs")],
        "pays_below_share_of_rate": Annotated[
            float | None,
            Field(
                description="share of the GPU's peak rate at the smaller micro-batch below which the larger pays; "
                "null: never"
            ),
        ],
    },
)


class RecomputeBatches(Gain):
    """The largest micro-batch without and with recomputation, and when the larger one has the higher throughput."""

    replayed: bool
    """whether both, and the next larger ones, were replayed; else they are estimates"""


class RecomputeOffload(TypedDict):
    """Offload of activations to host memory within the same budget."""

    host_bytes_per_rank: int | None
    """held in host memory"""
    host_bytes_per_node: int | None
    """by all ranks of a node"""
    bytes_per_second: float
    step_seconds: float
    enough: bool
    freed_bytes: int | None
    layers: list[int] | None
    waited_seconds: float | None


class RecomputeVerified(TypedDict):
    """A phase of the planned step, and of its trace on an emulated device. Bytes."""

    device: str
    phase: str
    planned: int
    traced: int


class RecomputeReserved(TypedDict):
    """Reserved memory of the planned step, from the replay and from an emulated device. Bytes."""

    device: str
    planned: int
    traced: int


class RecomputeDocument(TypedDict):
    """The document that `recompute --format json` prints."""

    schema_version: Literal[2]
    source: Literal["recompute"]
    name: str
    spec: SpecDocument
    verdict: Answer
    """of the run with the plan"""
    fits: bool | None
    limit_bytes: int
    """of a GPU: its usable memory, or the budget"""
    least_bytes: int
    """lower bound of device memory"""
    device_bytes: int | None
    """of the run with the plan; null without a GPU"""
    reserved_bytes: int | None
    interval: IntervalBytes | None
    budget_bytes: int
    """allocated memory that fits; no cheaper plan within it was found"""
    strategy: str
    recompute: str | list[Any]
    """for training.recompute; a nested list is one checkpoint segment"""
    recompute_keep: list[str]
    peak_bytes: int
    """allocated by the plan, after the allocator replay"""
    rests_bytes: int
    """unsplit remainders of blocks in peak_bytes, which before, rules and front leave out"""
    peak_phase: str
    kept_bytes: int
    forward_flops: int
    again_flops: int
    may_save_at_most_flops: int | None
    """recomputed FLOPs that a better plan could avoid; null: unknown"""
    before: RecomputePrice
    rules: dict[str, RecomputePrice]
    front: list[RecomputePoint]
    largest_micro_batch: RecomputeBatches | None
    offload: RecomputeOffload | None
    """null: not computed"""
    blocks: list[dict[str, Any]]
    """the chain that was planned, block by block"""
    frameworks: dict[str, RecomputeFramework]
    verified: list[RecomputeVerified]
    verified_reserved: list[RecomputeReserved]
    limits: list[LimitRow]
    not_modelled: list[str]


class ChainPoint(TypedDict):
    """A plan of the Pareto front of a chain."""

    plan: list[Any]
    peak_bytes: int
    again_flops: int


class ChainDocument(TypedDict):
    """The document that `recompute --format json` prints for a file that describes a chain of blocks."""

    schema_version: Literal[1]
    source: Literal["recompute"]
    name: str
    budget_bytes: int | None
    """null: a given plan, without a limit"""
    strategy: str
    plan: list[Any]
    """blocks by position; a nested list is one checkpoint segment"""
    peak_bytes: int
    rests_bytes: int
    """always 0: the allocator is not replayed"""
    forward_flops: int
    again_flops: int
    """recomputed FLOPs"""
    may_save_at_most_flops: int | None
    """recomputed FLOPs that a better plan could avoid; null: unknown"""
    front: list[ChainPoint]
    blocks: list[dict[str, Any]]
    """the chain"""
    batch: int
    """samples, if the sizes of the file are per sample; else 1"""
    largest_batch: Gain | None
    """null: not requested"""


def planning_document(planning: RecomputeResult, checked: list[DeviceVerification]) -> RecomputeDocument:
    """Return the document of a planned run.

    Args:
        planning: the plan.
        checked: its traces on emulated devices.
    """
    configured, found = planning.configured, planning.plan
    return {
        "schema_version": SCHEMA_VERSION,
        "source": "recompute",
        "name": configured.spec.name,
        "spec": planning.result.spec.model_dump(mode="json"),
        "verdict": planning.verdict.answer,
        "fits": planning.verdict.fits,
        "limit_bytes": planning.limit,
        "least_bytes": planning.verdict.least_bytes,
        "device_bytes": planning.result.headline.device_bytes,
        "reserved_bytes": planning.result.headline.reserved_bytes,
        "interval": interval(planning.verdict),
        "budget_bytes": planning.budget,
        "strategy": found.plan.strategy,
        "recompute": planning.recompute,
        "recompute_keep": list(planning.saved_operators),
        "peak_bytes": planning.peak_bytes,
        "rests_bytes": planning.remainder_bytes,
        "peak_phase": planning.result.ledger.peak_phase,
        "kept_bytes": found.evaluation.saved_bytes,
        "forward_flops": configured.chain.flops,
        "again_flops": found.evaluation.recompute_flops,
        "may_save_at_most_flops": found.loss,
        "before": _price(planning.before),
        "rules": {name: _price(evaluation) for name, evaluation in planning.rules},
        "front": [
            {**_price(point.evaluation), "recompute": configured.recompute(point.plan.items)}
            for point in planning.front
        ],
        "largest_micro_batch": {**_gain(planning.gain), "replayed": planning.gain.replayed},
        "offload": _offload(planning),
        "blocks": [block._asdict() for block in configured.chain.blocks],
        "frameworks": {
            said.framework: {**_price(said.evaluation), "lines": list(said.lines), "difference": said.difference}
            for said in planning.framework_texts
        },
        "verified": [
            {"device": device.device, "phase": phase, "planned": planned, "traced": traced}
            for device in checked
            for phase, planned, traced in device.phases
        ],
        "verified_reserved": [
            {"device": device.device, "planned": device.reserved[0], "traced": device.reserved[1]}
            for device in checked
            if not device.missing
        ],
        "limits": [limit_row(limit) for limit in planning.result.limits],
        "not_modelled": list(planning.result.not_modelled),
    }


def chain_document(planning: ChainPlanning) -> ChainDocument:
    """Return the document of a planned chain."""
    chain, found, gain = planning.configured.chain, planning.plan, planning.gain
    return {
        "schema_version": 1,
        "source": "recompute",
        "name": planning.name,
        "budget_bytes": planning.budget,
        "strategy": found.plan.strategy,
        "plan": _listed(found.plan.items),
        "peak_bytes": found.evaluation.peak_bytes,
        "rests_bytes": 0,
        "forward_flops": chain.flops,
        "again_flops": found.evaluation.recompute_flops,
        "may_save_at_most_flops": found.loss,
        "front": [
            {
                "plan": _listed(point.plan.items),
                "peak_bytes": point.evaluation.peak_bytes,
                "again_flops": point.evaluation.recompute_flops,
            }
            for point in planning.front
        ],
        "blocks": [block._asdict() for block in chain.blocks],
        "batch": planning.batch,
        "largest_batch": None if gain is None else _gain(gain),
    }


def _listed(items: Segment) -> list[Any]:
    """Return a plan with lists in place of tuples."""
    return [item if isinstance(item, int) else _listed(item) for item in items]


def peak_place(evaluation: Evaluation) -> str:
    """Return the block of the peak and its direction."""
    peak = evaluation.peak
    words = {"again": "recomputed", "forward": "forward", "backward": "backward"}
    return f"{peak.block}, {words[peak.phase]}" if peak.block else peak.phase.replace("_", " ")


def _price(evaluation: Evaluation) -> RecomputePrice:
    return {
        "peak_bytes": evaluation.peak_bytes,
        "moment": peak_place(evaluation),
        "kept_bytes": evaluation.saved_bytes,
        "again_flops": evaluation.recompute_flops,
    }


def _gain(gain: batch_gain.Gain) -> Gain:
    return {
        "without": gain.without,
        "with": gain.most,
        "slow_down": gain.slow_down,
        "pays_below_share_of_rate": gain.pays_below,
    }


def _offload(planning: RecomputeResult) -> RecomputeOffload | None:
    third = planning.third
    if third is None:
        return None
    found = third.offload
    return {
        "bytes_per_second": third.bytes_per_second,
        "step_seconds": third.step_seconds,
        "enough": found is not None,
        "freed_bytes": None if found is None else found.freed_bytes,
        "layers": None if found is None else [block - planning.configured.first for block in found.blocks],
        "waited_seconds": None if found is None else found.waited_seconds,
        "host_bytes_per_rank": None if found is None else third.host_bytes_per_rank,
        "host_bytes_per_node": None if found is None else third.host_bytes_per_node,
    }
