"""The figures of torch.cuda.memory_stats, derived from the counters.

Source: torch/cuda/memory.py: memory_stats; torch/csrc/cuda/Module.cpp: THCPModule_memoryStats.
"""

from __future__ import annotations

from memcalc.allocator.counters import Counter, Counters, Peaks, PoolCounters
from memcalc.allocator.sizes import UNLIMITED


def memory_stats(counters: Counters) -> dict[str, int]:
    """Return every figure of torch.cuda.memory_stats, under its name, in PyTorch's order."""
    rows: dict[str, int] = {}
    both = (counters.small, counters.large)
    for kind, peaks, tallies, reserved, segments in (
        ("all", counters.peaks, both, counters.reserved, counters.segments),
        ("small_pool", counters.small, (counters.small,), counters.small.reserved, counters.small.segments),
        ("large_pool", counters.large, (counters.large,), counters.large.reserved, counters.large.segments),
    ):
        figures = _figures(peaks, tallies) | {"reserved_bytes": _gauge(reserved), "segment": _gauge(segments)}
        for quantity, four in figures.items():
            rows |= {f"{quantity}.{kind}.{name}": value for name, value in four.items()}
    for quantity, gauge in (
        ("oversize_allocations", counters.oversize_allocations),
        ("oversize_segments", counters.oversize_segments),
    ):
        rows |= {f"{quantity}.{name}": value for name, value in _gauge(gauge).items()}
    scalars = "num_alloc_retries num_ooms num_sync_all_streams num_device_alloc num_device_free".split()
    rows |= {name: getattr(counters, name) for name in scalars}
    rows["max_split_size"] = -1 if counters.max_split_size == UNLIMITED else counters.max_split_size
    if counters.counts_rejections:
        rows["num_oom_rejections"] = counters.num_oom_rejections
    return dict(sorted(rows.items()))


def _four(current: int, peak: int, added: int) -> dict[str, int]:
    return {"current": current, "peak": peak, "allocated": added, "freed": added - current}


def _gauge(gauge: Counter) -> dict[str, int]:
    return _four(gauge.current, gauge.peak, gauge.added)


def _figures(peaks: Peaks, tallies: tuple[PoolCounters, ...]) -> dict[str, dict[str, int]]:
    """Return the seven quantities that are counted per block.

    The peak of active blocks is the larger of two peaks: of the allocations, and of the one recorded while a block
    waited.
    """
    count = sum(t.allocations_now for t in tallies)
    count_added = sum(t.allocations_added for t in tallies)
    size = sum(t.allocated_now for t in tallies)
    size_added = sum(t.allocated_added for t in tallies)
    waiting = sum(t.waiting_now for t in tallies)
    waiting_bytes = sum(t.waiting_bytes_now for t in tallies)
    return {
        "allocation": _four(count, peaks.allocations, count_added),
        "allocated_bytes": _four(size, peaks.allocated, size_added),
        "active": _four(count + waiting, max(peaks.active, peaks.allocations), count_added),
        "active_bytes": _four(size + waiting_bytes, max(peaks.active_bytes, peaks.allocated), size_added),
        "requested_bytes": _four(
            sum(t.requested_now for t in tallies), peaks.requested, sum(t.requested_added for t in tallies)
        ),
        "inactive_split_bytes": _four(
            sum(t.inactive_now for t in tallies), peaks.inactive, sum(t.inactive_added for t in tallies)
        ),
        "inactive_split": _four(
            sum(t.inactive_blocks_now for t in tallies),
            peaks.inactive_blocks,
            sum(t.inactive_blocks_added for t in tallies),
        ),
    }
