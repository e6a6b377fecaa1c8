"""Verification of the allocator model: a recording replayed against itself.

The driver's responses are taken from the recording: the addresses it returned, and when it failed. Everything else is
computed by the model: the block for each request, splits, merges, and when and how much memory is allocated from the
driver.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from memcalc.allocator.driver import Driver
from memcalc.allocator.pytorch.best_fit import best_fit
from memcalc.allocator.pytorch.caching import CachingAllocator
from memcalc.allocator.pytorch.constants import SMALL_REQUEST
from memcalc.allocator.pytorch.rounding import block_size
from memcalc.allocator.pytorch.settings import Settings, parse_settings
from memcalc.allocator.pytorch.versions import Version
from memcalc.allocator.sizes import UNLIMITED
from memcalc.errors import InputError, OutOfMemory
from memcalc.snapshots.frames import empties_cache
from memcalc.snapshots.initial_state import InitialState, beginning, block_sizes, contradiction
from memcalc.snapshots.preloading import preload
from memcalc.snapshots.recording import DeviceRecording, Snapshot, SnapshotEntry

FETCHED, RETURNED = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")


@dataclass(frozen=True, slots=True)
class Verification:
    """The agreement of the model with the real run."""

    entries: int  # of the history
    agreed: int  # replayed before the first difference; all if there is none
    segments: int  # allocated, freed or mapped during the history, plus those at the end
    difference: str  # the first one, in words; "" if there is none
    version: Version
    from_start: bool  # whether the history starts with the first allocation
    gaps: int  # inconsistent entries: the recording itself is incomplete

    @property
    def agrees(self) -> bool:
        """Whether the model produced the same segments and blocks as the real run, at the same addresses."""
        return not self.difference


class _Difference(Exception):
    """The model differs from the run."""


class _RecordedDriver(Driver):
    """Driver with the recorded responses; `pending` holds the driver's entries before the next request."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: list[SnapshotEntry] = []

    def malloc(self, size: int) -> int | None:
        entry = self._next("segment_alloc")
        if entry is None:
            return None
        if entry.size != size:
            raise _Difference(f"the run allocates a segment of {entry.size:,} bytes, the model one of {size:,}")
        return entry.address

    def free(self, address: int, size: int) -> None:
        """Do nothing: `watch` compares frees."""

    def reserve_addresses(self, size: int) -> int:  # noqa: ARG002 - the addresses are the recording's
        entry = self._next("segment_map")
        if entry is None:
            raise _Difference("the model begins an expandable segment where the run mapped nothing")
        return entry.address

    def map_pages(self, pages: int, page: int) -> bool:
        entry = self._next("segment_map")
        if entry is not None and entry.size != pages * page:
            raise _Difference(f"the run mapped {entry.size:,} bytes, the model {pages * page:,}")
        return entry is not None

    def unmap_pages(self, pages: int, page: int) -> None:
        """Do nothing: `watch` compares frees."""

    def _next(self, action: str) -> SnapshotEntry | None:
        """Return the next entry if it has this action."""
        return self.pending[0] if self.pending and self.pending[0].action == action else None

    def watch(self, action: str, address: int, size: int, stream: int) -> None:
        """Remove a pending entry that the model has reproduced; called for every driver allocation and free."""
        size = abs(size)
        for at, entry in enumerate(self.pending):
            if (entry.action, entry.address, entry.size) == (action, address, size):
                del self.pending[at]
                return
        raise _Difference(
            f"the model has {action} of {size:,} bytes at {address:#x} on stream {stream}, the run has not"
        )


def verify(
    snapshot: Snapshot, recording: DeviceRecording, start: InitialState | None = None, told: str = ""
) -> Verification:
    """Replay a recording with the rules of the PyTorch version that wrote it, until the first difference.

    If several versions are possible, the one with the longest agreement is used.

    Args:
        snapshot: the file.
        recording: one device of it.
        start: its initial state, if already known.
        told: PYTORCH_CUDA_ALLOC_CONF of the run, for files without settings.
    """
    start = start or beginning(recording)
    found = [_verified(snapshot, recording, start, told, version) for version in releases_of(snapshot)]
    return max(found, key=lambda one: (one.agrees, one.agreed))


def can_verify(recording: DeviceRecording, start: InitialState) -> bool:
    """Return whether there is a history with a known start."""
    return not recording.is_cut or (bool(recording.entries) and start.is_empty)


def _verified(
    snapshot: Snapshot, recording: DeviceRecording, start: InitialState, told: str, version: Version
) -> Verification:
    """Verify with the rules of one version."""
    settings = settings_of(snapshot, recording, version, told)
    block_sizes(start, settings)
    done, difference = 0, contradiction(start)
    if difference:
        difference = f"before its first entry: {difference}"
    else:
        rerun = _ModelState(snapshot, settings, version, recording, start)
        difference = rerun.run()
        done = rerun.done
    ends = 0 if recording.is_cut else len(recording.segments)
    segments = sum(entry.action in (*FETCHED, *RETURNED) for entry in recording.entries) + ends
    return Verification(
        entries=len(recording.entries),
        agreed=done,
        segments=segments,
        difference=difference,
        version=version,
        from_start=start.is_empty,
        gaps=start.gaps,
    )


class _ModelState:
    """The state of the model during the replay of a history."""

    def __init__(
        self, snapshot: Snapshot, settings: Settings, version: Version, recording: DeviceRecording, start: InitialState
    ) -> None:
        self.done = 0
        self._snapshot = snapshot
        self._driver = _RecordedDriver()
        self._allocator = CachingAllocator(settings, version, self._driver)
        self._blocks = preload(self._allocator, start, recording.entries)
        self._allocator.memory.watch = self._driver.watch
        self._waiting = {
            held.address: self._blocks.pop(held.address) for held in start.blocks_in_use.values() if held.is_waiting
        }
        self._releases_some = settings.max_split_size != UNLIMITED or settings.garbage_collection_threshold > 0
        self._recording = recording
        self._entries = recording.entries
        self._known_pools = [(s.address, s.address + s.total_size, s.pool) for s in recording.segments if s.pool]

    def run(self) -> str:
        """Replay the whole history; return the first difference in words, or ""."""
        pending = self._driver.pending
        try:
            for entry in self._entries:
                action = entry[0]
                if action == "alloc":
                    self._alloc(entry)
                elif action == "free_requested":
                    if pending:
                        self.finish()
                    self._free(entry[1])
                elif action != "free_completed":
                    self._seldom(entry)
                elif self._waiting:
                    self._complete(entry[1])
                self.done += 1
            if not self._recording.is_cut:
                self.finish()
                self.compare_ends(self._recording)
        except _Difference as found:
            return f"at entry {self.done:,} of {len(self._recording.entries):,}: {found}"
        return ""

    def _seldom(self, entry: SnapshotEntry) -> None:
        """Replay an entry that is neither an allocation nor a free."""
        if entry.action == "oom":
            self.finish()
            self._fail(entry)
        else:
            self._driver.pending.append(entry)

    def finish(self) -> None:
        """Free to the driver what the run freed outside of a request, by emptying the cache."""
        if any(entry.action in RETURNED for entry in self._driver.pending):
            self._allocator.empty_cache()
        if self._driver.pending:
            entry = self._driver.pending[0]
            raise _Difference(
                f"the run has {entry.action} of {entry.size:,} bytes at {entry.address:#x}, the model not"
            )

    def compare_ends(self, recording: DeviceRecording) -> None:
        """Compare the final segments, block by block."""
        views = self._allocator.segments()
        if len(views) != len(recording.segments):
            raise _Difference(f"the run ends with {len(recording.segments)} segments, the model with {len(views)}")
        for mine, theirs in zip(views, recording.segments, strict=True):
            blocks = [(b.address, b.size, b.state) for b in mine.blocks]
            if blocks != [(b.address, b.size, b.state) for b in theirs.blocks]:
                raise _Difference(f"at the end the blocks of the segment at {theirs.address:#x} differ")
            figures = (mine.total_size, mine.allocated_size, mine.active_size, mine.is_expandable)
            if figures != (theirs.total_size, theirs.allocated_size, theirs.active_size, theirs.is_expandable):
                raise _Difference(f"at the end the figures of the segment at {theirs.address:#x} differ")

    def _alloc(self, entry: SnapshotEntry) -> None:
        _, address, size, stream, _, _, pool = entry
        if not size or address in self._blocks:
            raise _Difference(f"{size:,} bytes at {address:#x} cannot be allocated")
        if self._driver.pending and self._was_emptied(entry):
            self._allocator.empty_cache()
        if pool is None and self._known_pools:
            pool = self._pool_at(address)
        if pool:
            self._allocator.private.begin(pool)
        try:
            block = self._allocator.malloc(size, stream)
        except OutOfMemory:
            raise _Difference(f"the run takes {size:,} bytes from its cache, the model allocates a segment") from None
        finally:
            if pool:
                self._allocator.private.end(pool)
        if block.address != address:
            raise _Difference(f"{size:,} bytes are at {address:#x} in the run and at {block.address:#x} in the model")
        if self._driver.pending:
            left = self._driver.pending[0]
            raise _Difference(
                f"the run has {left.action} of {left.size:,} bytes, the model serves the request without it"
            )
        self._blocks[address] = block

    def _was_emptied(self, request: SnapshotEntry) -> bool:
        """Return whether the whole cache was emptied before this request.

        If nothing else frees memory to the driver, it does not matter whether the program or a shortage emptied the
        cache.
        Otherwise it was the program if a stack shows it, or if the cache could have served the request.
        """
        pending = self._driver.pending
        if not any(entry.action in RETURNED for entry in pending):
            return False
        if not self._releases_some or not any(entry.action in FETCHED for entry in pending):
            return True
        if any(empties_cache(self._snapshot, entry.stack) for entry in pending if entry.action in RETURNED):
            return True
        settings = self._allocator.settings
        size = block_size(request.size, settings.roundup_power2_divisions)
        pair = self._allocator.default
        free_set = (pair.small if size <= SMALL_REQUEST else pair.large).free_set_of(request.stream)
        block = best_fit(free_set, size, settings)
        if block is not None:
            free_set.add(block)
        return block is not None

    def _free(self, address: int) -> None:
        block = self._blocks.pop(address, None)
        if block is None:
            return  # the recording has no allocation for it: counted as a gap
        following = self._entries[self.done + 1] if self.done + 1 < len(self._entries) else None
        if following is not None and following[1] == address and following[0] == "free_completed":
            self._allocator.free(block)
        else:
            self._allocator.free_until_completed(block)
            self._waiting[address] = block

    def _fail(self, entry: SnapshotEntry) -> None:
        try:
            self._allocator.malloc(entry.size, entry.stream)
        except OutOfMemory:
            return
        raise _Difference(f"the run runs out of memory at {entry.size:,} bytes, the model allocates them")

    def _complete(self, address: int) -> None:
        """Complete a block that waits for other streams; most blocks are freed at once."""
        block = self._waiting.pop(address, None)
        if block is not None:
            self._allocator.complete(block)

    def _pool_at(self, address: int) -> int:
        return next((pool for begin, end, pool in self._known_pools if begin <= address < end), 0)


# The version that introduced a key, in the settings or in an entry of the history; the newest first.
_SETTINGS_SINCE = (("max_cached_size", 13), ("max_round_threshold", 13))
_ENTRIES_SINCE = (("pool_id", 12), ("user_metadata", 10), ("compile_context", 8))


def releases_of(snapshot: Snapshot) -> tuple[Version, ...]:
    """Return the versions that may have written a file; several only if its settings were truncated."""
    found = release_of(snapshot)
    if snapshot.lacks and not snapshot.settings and found >= Version(2, _ENTRIES_SINCE[0][1]):
        return (found, *(Version(2, minor) for minor in sorted({minor for _, minor in _SETTINGS_SINCE})))
    return (found,)


def release_of(snapshot: Snapshot) -> Version:
    """Return the oldest version that writes such files; its rules hold up to the version of the next key."""
    for key, minor in _SETTINGS_SINCE:
        if key in snapshot.settings:
            return Version(2, minor)
    for key, minor in _ENTRIES_SINCE:
        if key in snapshot.keys:
            return Version(2, minor)
    return Version(2, 6)  # for this purpose, 2.1 to 2.7 have the same rules


def settings_of(snapshot: Snapshot, recording: DeviceRecording, version: Version, told: str = "") -> Settings:
    """Return the allocator's settings during the recording.

    A memory fraction is not recorded; its effect is in the history.

    Args:
        snapshot: the file.
        recording: one device of it.
        version: the PyTorch version, for the known options.
        told: the settings from the user, for files without settings (before torch 2.2).
    """
    known = snapshot.settings
    if known:
        try:
            return parse_settings(str(known["PYTORCH_CUDA_ALLOC_CONF"]), version)
        except (InputError, KeyError):
            return _from_fields(known)
    settings = parse_settings(told, version)
    maps = any(entry.action == "segment_map" for entry in recording.entries)
    return replace(settings, expandable_segments=settings.expandable_segments or maps)


def _from_fields(known: dict[str, Any]) -> Settings:
    """Return settings from single values, if the text has options unknown in this version."""
    largest = known.get("max_split_size", -1)
    divisions = known.get("roundup_power2_divisions")
    slots = tuple(divisions.values()) if isinstance(divisions, dict) and len(divisions) == 16 else None
    return Settings(
        max_split_size=UNLIMITED if largest < 0 else largest,
        expandable_segments=bool(known.get("expandable_segments", False)),
        roundup_power2_divisions=slots if slots and any(slots) else None,
    )
