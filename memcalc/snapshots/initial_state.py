"""The state of a device at the start of its history: the final state, with the history undone entry by entry."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from memcalc.allocator.pytorch.constants import LARGE_SEGMENT, SMALL_SEGMENT, UNSPLIT_REST
from memcalc.allocator.pytorch.rounding import block_size
from memcalc.allocator.pytorch.settings import Settings
from memcalc.snapshots.recording import DeviceRecording, RecordedSegment, SnapshotEntry


@dataclass(slots=True)
class BlockInUse:
    """A block in use. Bytes."""

    address: int  # its address
    requested: int  # bytes requested for it
    size: int | None  # of the block; None if unknown, because it was freed before the end
    stream: int  # handle of its CUDA stream
    stack: int  # number of its stack
    is_waiting: bool = False  # whether it is freed, but other streams may still use it


@dataclass(slots=True)
class Range:
    """Memory from the driver: a segment, or a mapped range of an expandable one. Bytes."""

    address: int
    size: int
    stream: int
    is_small: bool
    pool: int
    is_expandable: bool


@dataclass(slots=True)
class InitialState:
    """The state before the first entry. `gaps` counts entries that are inconsistent with later ones."""

    blocks_in_use: dict[int, BlockInUse] = field(default_factory=dict)  # by address
    ranges: dict[int, Range] = field(default_factory=dict)  # by address; expandable ones page by page
    gaps: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether the history starts with the first allocation."""
        return not self.blocks_in_use and not self.ranges


def beginning(recording: DeviceRecording) -> InitialState:
    """Return the initial state, going backwards from the final segments; forwards if the history's end is missing."""
    if recording.is_cut and recording.entries:
        return _used_before(recording)
    state = InitialState()
    for segment in recording.segments:
        for block in segment.blocks:
            if block.state != "inactive":
                waiting = block.state == "active_pending_free"
                state.blocks_in_use[block.address] = BlockInUse(
                    block.address, block.requested_size, block.size, segment.stream, block.stack, waiting
                )
        state.ranges[segment.address] = _range(segment)
    _undo(state, recording.entries)
    return state


def _used_before(recording: DeviceRecording) -> InitialState:
    """Return the part of the initial state that is known without the end of the history.

    Blocks are those that the history frees without allocating them; segments are those that it frees to the driver, or
    that still exist at the end.
    """
    state = InitialState()
    known: set[int] = set()  # blocks that the history allocates
    ranges: list[tuple[int, int]] = []  # segments that the history allocates
    for entry in recording.entries:
        action, address, size = entry.action, entry.address, entry.size
        if action in ("segment_alloc", "segment_map"):
            ranges.append((address, address + size))
        elif action in ("segment_free", "segment_unmap"):
            if not any(begin <= address < end for begin, end in ranges):
                _undo_segment(state, entry)
        elif action == "alloc":
            known.add(address)
        elif action in ("free_requested", "free_completed") and address not in known:
            known.add(address)
            state.blocks_in_use[address] = _freed(entry)
    touched = sorted({entry.address for entry in recording.entries})
    for segment in recording.segments:
        begin, end = segment.address, segment.address + segment.total_size
        uses = bisect_left(touched, begin) < bisect_left(touched, end)
        if uses and not any(first < end and begin < last for first, last in ranges):
            state.ranges[begin] = _range(segment)
    return state


def _undo(state: InitialState, entries: Sequence[SnapshotEntry]) -> None:
    """Compute the state before the entries. Inlined, because the loop runs once per entry.

    A freed block is represented by its entry, since most were allocated within the history.
    """
    held: dict[int, BlockInUse | SnapshotEntry] = dict(state.blocks_in_use)
    gaps = 0
    for entry in reversed(entries):
        action, address = entry[0], entry[1]
        if action == "alloc":
            gaps += held.pop(address, None) is None
        elif action == "free_completed":
            gaps += address in held
            held[address] = entry
        elif action == "free_requested":
            found = held.get(address)
            if found is None:
                gaps += 1
            elif isinstance(found, BlockInUse):
                found.is_waiting = False
            else:
                held[address] = entry
        elif action != "oom":
            _undo_segment(state, entry)
    state.blocks_in_use = {
        address: found if isinstance(found, BlockInUse) else _freed(found) for address, found in held.items()
    }
    state.gaps += gaps


def _freed(entry: SnapshotEntry) -> BlockInUse:
    """Return the block that an entry frees; it is waiting if its free was requested before the history begins."""
    waits = entry.action == "free_completed"
    return BlockInUse(entry.address, entry.size, None, entry.stream, entry.stack, is_waiting=waits)


def _undo_segment(state: InitialState, entry: SnapshotEntry) -> None:
    """Undo a segment's allocation, release, mapping or unmapping."""
    action, address, size = entry.action, entry.address, entry.size
    if action == "segment_alloc":
        state.gaps += state.ranges.pop(address, None) is None
    elif action == "segment_free":
        is_small = size == SMALL_SEGMENT  # reliable: large segments have 20 MiB, or the size of their first request
        state.ranges[address] = Range(address, size, entry.stream, is_small, entry.pool or 0, is_expandable=False)
    elif action == "segment_map":
        _unmap(state, address, size)
    else:
        is_small = size % LARGE_SEGMENT != 0  # a page of the large pool has the size of a large segment
        _map(state, Range(address, size, entry.stream, is_small, entry.pool or 0, is_expandable=True))


def block_sizes(state: InitialState, settings: Settings) -> None:
    """Fill in block sizes that are missing in the snapshot.

    A block is its rounded request plus an unsplit remainder: in the large pool up to 1 MiB, and of any size if the
    request is larger than max_split_size.

    Args:
        state: the initial state; modified.
        settings: of the run.
    """
    ends = sorted(state.blocks_in_use)
    for number, address in enumerate(ends):
        held = state.blocks_in_use[address]
        if held.size is not None:
            continue
        held.size = block_size(held.requested, settings.roundup_power2_divisions)
        room = next((r for r in state.ranges.values() if r.address <= address < r.address + r.size), None)
        if room is None or room.is_small or room.is_expandable:
            continue
        following = ends[number + 1] if number + 1 < len(ends) else room.address + room.size
        rest = min(following, room.address + room.size) - address - held.size
        if 0 < rest <= UNSPLIT_REST or held.size >= settings.max_split_size:
            held.size += max(0, rest)


def contradiction(state: InitialState) -> str:
    """Return why the state is impossible; "" if it is possible. Sizes of blocks must be filled in."""
    end = -1
    for found in sorted(state.ranges.values(), key=lambda found: found.address):
        if found.size <= 0 or found.address < end:
            return f"the segment at {found.address:#x} is empty or overlaps another one"
        end = found.address + found.size
    end = -1
    for held in sorted(state.blocks_in_use.values(), key=lambda held: held.address):
        assert held.size is not None
        if held.size <= 0 or held.address < end:
            return f"the block at {held.address:#x} is empty or overlaps another one"
        end = held.address + held.size
        if not any(r.address <= held.address and end <= r.address + r.size for r in state.ranges.values()):
            return f"the block at {held.address:#x} is in no segment"
    return ""


def _range(segment: RecordedSegment) -> Range:
    return Range(
        segment.address, segment.total_size, segment.stream, segment.is_small, segment.pool, segment.is_expandable
    )


def _unmap(state: InitialState, address: int, size: int) -> None:
    """Remove a range from the mapped range that contains it."""
    for begin, found in list(state.ranges.items()):
        if found.is_expandable and begin <= address and address + size <= begin + found.size:
            del state.ranges[begin]
            end = begin + found.size
            for part_begin, part_end in ((begin, address), (address + size, end)):
                if part_begin < part_end:
                    state.ranges[part_begin] = Range(
                        part_begin, part_end - part_begin, found.stream, found.is_small, found.pool, is_expandable=True
                    )
            return
    state.gaps += 1


def _map(state: InitialState, new: Range) -> None:
    """Add a mapped range, merged with adjacent ones."""
    for begin, found in list(state.ranges.items()):
        if found.is_expandable and found.stream == new.stream and new.address in (begin + found.size, begin - new.size):
            del state.ranges[begin]
            new = Range(min(begin, new.address), found.size + new.size, new.stream, found.is_small, new.pool, True)
    state.ranges[new.address] = new
