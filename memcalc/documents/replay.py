"""The document of `replay`: a run in an allocator, other settings, and the contents of a memory snapshot. Bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NotRequired

from typing_extensions import TypedDict

from memcalc.allocator.result import CounterSample
from memcalc.allocator.views import BlockView, SegmentView, State
from memcalc.documents.shared import Gpu, filled
from memcalc.documents.timeline import component_name
from memcalc.events.event import Event
from memcalc.replaying import ReplayComparison, Trial
from memcalc.snapshots.verification import release_of

SAMPLES = 200  # points of the memory curve, at most


class ReplayPoint(TypedDict):
    """The counters of the allocator after one event."""

    event: int
    """its position, from 0; -1: before the first one"""
    phase: str | None
    requested_bytes: int
    allocated_bytes: int
    active_bytes: int
    reserved_bytes: int
    inactive_split_bytes: int


class ReplayFailure(TypedDict):
    """The event at which the run runs out of memory."""

    event: int
    message: str
    """as the framework prints it"""


class ReplayTrial(TypedDict):
    """The run under one allocator with its settings; the figures are missing where the allocator rejects them."""

    allocator: str
    settings: str
    refused: str | None
    """why the allocator cannot run"""
    fits: NotRequired[bool]
    peak_allocated_bytes: NotRequired[int]
    peak_reserved_bytes: NotRequired[int]
    peak_device_bytes: NotRequired[int]
    device_allocations: NotRequired[int]
    """driver calls that allocated memory"""
    device_frees: NotRequired[int]
    """driver calls that freed memory"""
    failure: NotRequired[ReplayFailure | None]


class ReplayRecommendation(TypedDict):
    """The setting that reserves least."""

    allocator: str
    settings: str
    saved_bytes: int | None
    """of reserved memory; null: the requested setting fails"""
    makes_it_fit: bool


class ReplayBlock(TypedDict):
    """A block of a segment."""

    address: int
    bytes: int
    requested_bytes: int
    state: State
    component: str | None
    line: str | None
    """of the program that allocated it"""


class ReplaySegment(TypedDict):
    """Memory from one driver allocation, with the fields of torch.cuda.memory_snapshot."""

    address: int
    total_size: int
    allocated_size: int
    active_size: int
    requested_size: int
    stream: int
    segment_type: Literal["small", "large"]
    segment_pool_id: int
    is_expandable: bool
    blocks: list[ReplayBlock]


class SnapshotLine(TypedDict):
    """A line of the program, and its live tensors at the peak."""

    line: str
    component: str | None
    bytes: int
    tensors: int
    largest_bytes: int


class SnapshotLeak(TypedDict):
    """A line of the program that allocates in every step what it never frees."""

    line: str
    steps: int
    tensors: int
    bytes: int


class SnapshotEnd(TypedDict):
    """Memory at the end of the history."""

    allocated_bytes: int
    reserved_bytes: int
    inactive_split_bytes: int
    rounding_bytes: int
    """allocated minus requested bytes of blocks in use"""


class SnapshotReport(TypedDict):
    """Contents of a PyTorch memory snapshot, and whether the model of the allocator reproduces it."""

    lacks: list[str]
    """parts that a truncated file lacks"""
    torch: str
    entries: int
    agrees: bool | None
    """null: the history is incomplete"""
    agreed_entries: int | None
    segments_compared: int | None
    difference: str | None
    """the first one"""
    from_first_allocation: bool
    gaps: int
    requested_peak_bytes: int
    components: dict[str, int]
    lines: list[SnapshotLine]
    steps: int
    leaks: list[SnapshotLeak]
    end: SnapshotEnd


class ReplayDocument(TypedDict):
    """The document that `replay --format json` prints."""

    schema_version: Literal[1]
    source: Literal["replay"]
    name: str
    kind: Literal["events", "snapshot", "trace"]
    """of the file"""
    events: int
    allocator: str
    settings: str
    gpu: Gpu | None
    fits: bool | None
    """null without a GPU"""
    peak: ReplayPoint
    """of allocated memory"""
    most_reserved: ReplayPoint
    """peak of reserved memory"""
    end: ReplayPoint
    over_time: list[list[int]]
    """event, allocated and reserved bytes, evenly spaced"""
    trials: list[ReplayTrial]
    """the first one is the requested one"""
    recommendation: ReplayRecommendation | None
    shown_event: int
    """position of `segments`"""
    segments: list[ReplaySegment]
    statistics: dict[str, int]
    """under the framework's names, at the end"""
    recording: SnapshotReport | None
    """null: the file is no snapshot"""
    notes: list[str]


def replay_document(replay: ReplayComparison) -> ReplayDocument:
    """Return the document of a replay."""
    gpu_spec, found = replay.gpu, replay.recommendation
    return {
        "schema_version": 1,
        "source": "replay",
        "name": replay.source.name,
        "kind": replay.source.source_type,
        "events": len(replay.source.events),
        "allocator": replay.trials[0].policy,
        "settings": replay.trials[0].config,
        "gpu": None if gpu_spec is None else filled(Gpu, gpu_spec),
        "fits": None if gpu_spec is None else not replay.failed,
        "peak": _point(replay.result.peak_allocated_sample, replay),
        "most_reserved": _point(replay.result.peak_reserved_sample, replay),
        "end": _point(replay.result.end, replay),
        "over_time": _samples(replay),
        "trials": [_trial(trial) for trial in replay.trials],
        "recommendation": None
        if found is None
        else filled(ReplayRecommendation, found, allocator=found.trial.policy, settings=found.trial.config),
        "shown_event": replay.shown_event,
        "segments": [_segment(segment, replay.owners) for segment in replay.segments],
        "statistics": replay.result.statistics,
        "recording": _recording(replay),
        "notes": list(replay.result.notes),
    }


def _point(moment: CounterSample, replay: ReplayComparison) -> ReplayPoint:
    return {
        "event": moment.event,
        "phase": replay.curve.phase_of(moment.event) or None,
        "requested_bytes": moment.requested,
        "allocated_bytes": moment.allocated,
        "active_bytes": moment.active,
        "reserved_bytes": moment.reserved,
        "inactive_split_bytes": moment.inactive_split,
    }


def _samples(replay: ReplayComparison) -> list[list[int]]:
    allocated, reserved = replay.curve.allocated or (), replay.curve.reserved or ()
    step = max(1, -(-len(allocated) // SAMPLES))
    return [[at, allocated[at], reserved[at]] for at in range(0, len(allocated), step)]


def _trial(trial: Trial) -> ReplayTrial:
    result = trial.result
    named: ReplayTrial = {"allocator": trial.policy, "settings": trial.config, "refused": trial.refused or None}
    if result is None:
        return named
    return filled(
        ReplayTrial,
        result,
        **named,
        peak_allocated_bytes=result.peak_allocated,
        peak_reserved_bytes=result.peak_reserved,
        peak_device_bytes=result.peak_device,
        failure=None if result.failure is None else filled(ReplayFailure, result.failure),
    )


def _segment(segment: SegmentView, owners: Mapping[int, Event]) -> ReplaySegment:
    blocks = [
        _block(block, owners.get(block.address) if block.state != "inactive" else None) for block in segment.blocks
    ]
    return filled(ReplaySegment, segment, blocks=blocks)


def _block(block: BlockView, owner: Event | None) -> ReplayBlock:
    return filled(
        ReplayBlock,
        block,
        bytes=block.size,
        requested_bytes=block.requested_size,
        component=None if owner is None or owner.component is None else owner.component.value,
        line=None if owner is None else owner.line or None,
    )


def _recording(replay: ReplayComparison) -> SnapshotReport | None:
    verification, found, recorded = replay.verification, replay.composition, replay.source.recorded
    if found is None or recorded is None:
        return None
    return {
        "lacks": list(recorded.snapshot.lacks),
        "torch": str(verification.version if verification else release_of(recorded.snapshot)),
        "entries": len(recorded.recording.entries),
        "agrees": verification.agrees if verification else None,
        "agreed_entries": verification.agreed if verification else None,
        "segments_compared": verification.segments if verification else None,
        "difference": verification.difference or None if verification else None,
        "from_first_allocation": recorded.start.is_empty,
        "gaps": recorded.start.gaps,
        "requested_peak_bytes": found.peak_bytes,
        "components": {component_name(component): size for component, size in found.by_component.items()},
        "lines": [
            filled(
                SnapshotLine,
                line,
                line=line.location,
                component=line.component.value if line.component else None,
                largest_bytes=line.largest,
            )
            for line in found.lines
        ],
        "steps": found.steps,
        "leaks": [filled(SnapshotLeak, leak, line=leak.location) for leak in found.leaks],
        "end": filled(SnapshotEnd, found),
    }
