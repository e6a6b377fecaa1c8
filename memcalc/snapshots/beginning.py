"""What a device held when its history begins: the end of the snapshot, with the history undone step by step."""

from __future__ import annotations

from dataclasses import dataclass, field

from memcalc.allocator.pytorch.constants import LARGE_SEGMENT, SMALL_SEGMENT, UNSPLIT_REST
from memcalc.allocator.pytorch.rounding import block_size
from memcalc.allocator.pytorch.settings import Settings
from memcalc.snapshots.recording import Entry, RecordedSegment, Recording


@dataclass(slots=True)
class Held:
    """A block that is in use. Bytes."""

    address: int
    requested: int
    size: int | None  # None where the snapshot does not tell, because it was freed before the end
    stream: int
    stack: int
    is_waiting: bool = False  # freed, but other streams may still use it


@dataclass(slots=True)
class Range:
    """Memory that came from the driver: a segment, or a mapped range of an expandable one. Bytes."""

    address: int
    size: int
    stream: int
    is_small: bool
    pool: int
    is_expandable: bool


@dataclass(slots=True)
class Beginning:
    """The state before the first entry. `gaps` counts entries that do not fit what came after them."""

    held: dict[int, Held] = field(default_factory=dict)  # by address
    ranges: dict[int, Range] = field(default_factory=dict)  # by address; expandable ones page by page
    gaps: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether the history begins with the first allocation."""
        return not self.held and not self.ranges


def beginning(recording: Recording) -> Beginning:
    """Walks the history backwards from the segments at the end."""
    state = Beginning()
    for segment in recording.segments:
        for block in segment.blocks:
            if block.state != "inactive":
                waiting = block.state == "active_pending_free"
                state.held[block.address] = Held(
                    block.address, block.requested_size, block.size, segment.stream, block.stack, waiting
                )
        state.ranges[segment.address] = _range(segment)
    for entry in reversed(recording.entries):
        if entry.action.startswith("segment"):
            _undo_segment(state, entry)
        elif entry.action != "oom":
            _undo_block(state, entry)
    return state


def _undo_block(state: Beginning, entry: Entry) -> None:
    """The state before a block was handed out or taken back."""
    held = state.held.get(entry.address)
    if entry.action == "alloc":
        state.gaps += held is None
        state.held.pop(entry.address, None)
    elif entry.action == "free_completed":
        state.gaps += held is not None
        state.held[entry.address] = Held(entry.address, entry.size, None, entry.stream, entry.stack, is_waiting=True)
    elif held is None:
        state.gaps += 1
    else:
        held.is_waiting = False


def _undo_segment(state: Beginning, entry: Entry) -> None:
    """The state before memory came from the driver or went back to it."""
    action, address, size = entry.action, entry.address, entry.size
    if action == "segment_alloc":
        state.gaps += state.ranges.pop(address, None) is None
    elif action == "segment_free":
        is_small = size == SMALL_SEGMENT  # as good as always: large ones are of 20 MiB or made to measure
        state.ranges[address] = Range(address, size, entry.stream, is_small, entry.pool or 0, is_expandable=False)
    elif action == "segment_map":
        _unmap(state, address, size)
    else:
        is_small = size % LARGE_SEGMENT != 0  # a page of the large pool is a whole segment of it
        _map(state, Range(address, size, entry.stream, is_small, entry.pool or 0, is_expandable=True))


def block_sizes(state: Beginning, settings: Settings) -> None:
    """Fills in the sizes that the snapshot does not tell.

    A block is its request, rounded up, and a rest behind it that was too small to be split off: in the large pool up to
    1 MiB, and whatever follows a request that is larger than max_split_size.

    Args:
        state: the state at the beginning.
        settings: those of the run.
    """
    ends = sorted(state.held)
    for number, address in enumerate(ends):
        held = state.held[address]
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


def contradiction(state: Beginning) -> str:
    """Why there can be no such state, in words; "" where there can. Sizes of blocks must be filled in."""
    end = -1
    for found in sorted(state.ranges.values(), key=lambda found: found.address):
        if found.size <= 0 or found.address < end:
            return f"the segment at {found.address:#x} is empty or lies in another one"
        end = found.address + found.size
    end = -1
    for held in sorted(state.held.values(), key=lambda held: held.address):
        assert held.size is not None
        if held.size <= 0 or held.address < end:
            return f"the block at {held.address:#x} is empty or lies in another one"
        end = held.address + held.size
        if not any(r.address <= held.address and end <= r.address + r.size for r in state.ranges.values()):
            return f"the block at {held.address:#x} lies in no segment"
    return ""


def _range(segment: RecordedSegment) -> Range:
    return Range(
        segment.address, segment.total_size, segment.stream, segment.is_small, segment.pool, segment.is_expandable
    )


def _unmap(state: Beginning, address: int, size: int) -> None:
    """Takes a range out of the mapped one that it lies in."""
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


def _map(state: Beginning, new: Range) -> None:
    """Adds a mapped range, joined with the ones at its ends."""
    for begin, found in list(state.ranges.items()):
        if found.is_expandable and found.stream == new.stream and new.address in (begin + found.size, begin - new.size):
            del state.ranges[begin]
            new = Range(min(begin, new.address), found.size + new.size, new.stream, found.is_small, new.pool, True)
    state.ranges[new.address] = new
