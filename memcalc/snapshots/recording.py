"""A snapshot as data: the final segments of each device, and its history."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class StackFrame(NamedTuple):
    """One line of a stack."""

    filename: str
    line: int
    name: str


Stack = tuple[StackFrame, ...]  # innermost first; empty if not recorded


class SnapshotEntry(NamedTuple):
    """One entry of the history, with PyTorch's names."""

    action: str  # alloc, free_requested, free_completed, segment_alloc, segment_free, segment_map, segment_unmap, oom
    address: int  # -1 for an oom
    size: int  # bytes: requested by the caller; for segments, from the driver; for an oom, the rounded request
    stream: int
    time_us: int  # since the epoch; 0 if not recorded
    stack: int  # its number in the snapshot's stacks
    pool: int | None  # 0 is the default pool; None if not recorded


class RecordedBlock(NamedTuple):
    """One block of a segment. Bytes."""

    address: int
    size: int
    requested_size: int  # stale in an inactive block
    state: str  # active_allocated, active_pending_free, inactive
    stack: int


class RecordedSegment(NamedTuple):
    """Memory from one driver allocation, or a mapped range of an expandable segment. Bytes."""

    address: int
    total_size: int
    allocated_size: int
    active_size: int
    requested_size: int  # -1 if not recorded
    stream: int
    is_small: bool
    pool: int
    is_expandable: bool
    blocks: tuple[RecordedBlock, ...]  # sorted by address


class Annotation(NamedTuple):
    """A mark of the program: "Optimizer.step#AdamW.step" from START to END."""

    stage: str
    name: str
    time_us: int


@dataclass(frozen=True)
class DeviceRecording:
    """One device of a snapshot."""

    device: int
    entries: tuple[SnapshotEntry, ...]  # in order; the oldest ones may have been overwritten
    segments: tuple[RecordedSegment, ...]  # at the end, sorted by address
    annotations: tuple[Annotation, ...]
    is_cut: bool = False  # whether entries are missing between the last one and the end


@dataclass(frozen=True)
class Snapshot:
    """A file of torch.cuda.memory._dump_snapshot."""

    recordings: tuple[DeviceRecording, ...]  # the devices with segments or a history
    stacks: tuple[Stack, ...]
    settings: dict[str, Any]  # allocator_settings; empty in old files
    keys: frozenset[str]  # of an entry; they depend on the version
    lacks: tuple[str, ...] = ()  # parts of the file that are missing or incomplete, because it was truncated
