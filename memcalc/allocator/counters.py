"""Counters of an allocator; `statistics.py` reports them as torch.cuda.memory_stats does.

Source: torch c10/core/CachingDeviceAllocator.h: DeviceStats.

PyTorch counts each of nine quantities three times (small pool, large pool, all): current value, peak, total increase
and total decrease. Only values that cannot be derived are counted here, because counting dominates the time of a
replay: all = small + large, decrease = increase - current, active = allocated + waiting for other streams.
"""

# ruff: noqa: PLR1730 - these methods run at every event of a replay, where calls of max() would cost a tenth of it

from __future__ import annotations

from memcalc.allocator.sizes import UNLIMITED


class Counter:
    """A current value, its peak, and its total increase."""

    __slots__ = ("added", "current", "peak")

    def __init__(self) -> None:
        self.current = 0
        self.peak = 0
        self.added = 0

    def change(self, by: int) -> None:
        """Change the value by `by`, which may be negative."""
        self.current += by
        if by > 0:
            self.added += by
            self.peak = max(self.peak, self.current)


class Peaks:
    """Peaks of one pool type or of all memory."""

    __slots__ = ("active", "active_bytes", "allocated", "allocations", "inactive", "inactive_blocks", "requested")

    def __init__(self) -> None:
        self.allocations = 0
        self.allocated = 0
        self.requested = 0
        self.inactive = 0
        self.inactive_blocks = 0
        self.active = 0  # recorded only while a block waits; otherwise the peaks of allocations and allocated apply
        self.active_bytes = 0


class PoolCounters(Peaks):
    """The counters of one pool type, small or large; `other_pool` is the Tally of the other type."""

    __slots__ = (
        "allocated_added", "allocated_now", "allocations_added", "allocations_now", "inactive_added",
        "inactive_blocks_added", "inactive_blocks_now", "inactive_now", "other_pool", "requested_added",
        "requested_now", "reserved", "segments", "waiting_bytes_now", "waiting_now",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.other_pool = self
        self.allocations_now = self.allocations_added = 0  # allocated blocks
        self.allocated_now = self.allocated_added = 0  # bytes of allocated blocks
        self.requested_now = self.requested_added = 0  # requested bytes of active blocks
        self.waiting_now = self.waiting_bytes_now = 0  # freed, but other streams may still use them
        self.inactive_now = self.inactive_added = 0  # bytes of free blocks in split segments, which cannot be released
        self.inactive_blocks_now = self.inactive_blocks_added = 0
        self.reserved = Counter()  # bytes of segments and of mapped pages
        self.segments = Counter()


class Counters:
    """All counters of one device."""

    def __init__(self, *, counts_rejections: bool) -> None:
        self.small, self.large, self.peaks = PoolCounters(), PoolCounters(), Peaks()
        self.small.other_pool, self.large.other_pool = self.large, self.small
        self.reserved, self.segments = Counter(), Counter()
        self.oversize_allocations, self.oversize_segments = Counter(), Counter()
        self.max_split_size = UNLIMITED
        self.num_alloc_retries = 0
        self.num_ooms = 0
        self.num_sync_all_streams = 0
        self.num_device_alloc = 0
        self.num_device_free = 0
        self.num_oom_rejections = 0
        self.counts_rejections = counts_rejections

    def count_allocated(self, tally: PoolCounters, size: int, requested: int) -> None:
        """Count an allocated block of `size` bytes for a request of `requested` bytes."""
        other, peaks = tally.other_pool, self.peaks

        now = tally.allocations_now = tally.allocations_now + 1
        tally.allocations_added += 1
        if now > tally.allocations:
            tally.allocations = now
        now += other.allocations_now
        if now > peaks.allocations:
            peaks.allocations = now

        now = tally.allocated_now = tally.allocated_now + size
        tally.allocated_added += size
        if now > tally.allocated:
            tally.allocated = now
        now += other.allocated_now
        if now > peaks.allocated:
            peaks.allocated = now

        now = tally.requested_now = tally.requested_now + requested
        tally.requested_added += requested
        if now > tally.requested:
            tally.requested = now
        now += other.requested_now
        if now > peaks.requested:
            peaks.requested = now

        if size >= self.max_split_size:
            self.oversize_allocations.change(1)
        if tally.waiting_now or other.waiting_now:
            self._active(tally)

    def count_freed(self, tally: PoolCounters, size: int) -> None:
        """Count a freed block, whether other streams still use it or not."""
        tally.allocations_now -= 1
        tally.allocated_now -= size
        if size >= self.max_split_size:
            self.oversize_allocations.change(-1)

    def waiting_changed(self, tally: PoolCounters, size: int, blocks: int) -> None:
        """Change the freed bytes and blocks that other streams may still use."""
        tally.waiting_now += blocks
        tally.waiting_bytes_now += size

    def _active(self, tally: PoolCounters) -> None:
        """Update the peaks of active blocks, which differ from the peaks of allocated blocks while blocks wait."""
        count = tally.allocations_now + tally.waiting_now
        size = tally.allocated_now + tally.waiting_bytes_now
        tally.active = max(tally.active, count)
        tally.active_bytes = max(tally.active_bytes, size)
        other, peaks = tally.other_pool, self.peaks
        peaks.active = max(peaks.active, count + other.allocations_now + other.waiting_now)
        peaks.active_bytes = max(peaks.active_bytes, size + other.allocated_now + other.waiting_bytes_now)

    def inactive_changed(self, tally: PoolCounters, size: int, blocks: int) -> None:
        """Change the bytes and number of free blocks in split segments."""
        now = tally.inactive_now = tally.inactive_now + size
        if size > 0:
            tally.inactive_added += size
            if now > tally.inactive:
                tally.inactive = now
            now += tally.other_pool.inactive_now
            if now > self.peaks.inactive:
                self.peaks.inactive = now
        if blocks:
            now = tally.inactive_blocks_now = tally.inactive_blocks_now + blocks
            if blocks > 0:
                tally.inactive_blocks_added += blocks
                if now > tally.inactive_blocks:
                    tally.inactive_blocks = now
                now += tally.other_pool.inactive_blocks_now
                if now > self.peaks.inactive_blocks:
                    self.peaks.inactive_blocks = now

    def reserved_changed(self, tally: PoolCounters, size: int, segments: int) -> None:
        """Count bytes and segments (0 for mapped pages) allocated from the driver or freed to it."""
        for gauge in (tally.reserved, self.reserved):
            gauge.change(size)
        for gauge in (tally.segments, self.segments):
            gauge.change(segments)
        if size > 0:
            self.num_device_alloc += 1
        else:
            self.num_device_free += 1

    @property
    def allocated_bytes(self) -> int:
        """Allocated bytes, as torch.cuda.memory_allocated."""
        return self.small.allocated_now + self.large.allocated_now

    @property
    def active_bytes(self) -> int:
        """Bytes that are allocated, or freed but waiting for other streams."""
        return self.allocated_bytes + self.small.waiting_bytes_now + self.large.waiting_bytes_now

    @property
    def requested_bytes(self) -> int:
        """Requested bytes of active blocks."""
        return self.small.requested_now + self.large.requested_now

    @property
    def reserved_bytes(self) -> int:
        """Reserved bytes, as torch.cuda.memory_reserved."""
        return self.reserved.current

    @property
    def inactive_split_bytes(self) -> int:
        """Free bytes that cannot be released, because another block of their segment is active."""
        return self.small.inactive_now + self.large.inactive_now

    def reset_peaks(self) -> None:
        """Set every peak to the current value, as torch.cuda.reset_peak_memory_stats."""
        for tally in (self.small, self.large):
            _set_peaks(tally, (tally,))
            tally.reserved.peak, tally.segments.peak = tally.reserved.current, tally.segments.current
        _set_peaks(self.peaks, (self.small, self.large))
        for gauge in (self.reserved, self.segments, self.oversize_allocations, self.oversize_segments):
            gauge.peak = gauge.current


def _set_peaks(peaks: Peaks, tallies: tuple[PoolCounters, ...]) -> None:
    peaks.allocations = sum(t.allocations_now for t in tallies)
    peaks.allocated = sum(t.allocated_now for t in tallies)
    peaks.requested = sum(t.requested_now for t in tallies)
    peaks.inactive = sum(t.inactive_now for t in tallies)
    peaks.inactive_blocks = sum(t.inactive_blocks_now for t in tallies)
    peaks.active = peaks.allocations + sum(t.waiting_now for t in tallies)
    peaks.active_bytes = peaks.allocated + sum(t.waiting_bytes_now for t in tallies)
