"""Allocators for tests, and their figures in MiB."""

from __future__ import annotations

from memcalc.allocator.addresses import FreeRanges
from memcalc.allocator.driver import Driver
from memcalc.allocator.pytorch.caching import CachingAllocator
from memcalc.allocator.pytorch.settings import parse_settings
from memcalc.allocator.pytorch.versions import parse_version

MIB = 2**20
END = 2**47  # of addresses, as good as any
VERSIONS = [f"2.{minor}" for minor in range(6, 16)]


def allocator(
    conf: str = "",
    version: str = "2.13",
    capacity: int | None = None,
    fraction: float | None = None,
    addresses: FreeRanges | None = None,
) -> CachingAllocator:
    """One with these settings, on a device of `capacity` bytes, with ranges where the driver puts them or first-fit."""
    parsed = parse_version(version)
    return CachingAllocator(parse_settings(conf, parsed, fraction), parsed, Driver(capacity, addresses=addresses))


def figures(subject: CachingAllocator) -> tuple[int, int, int]:
    """Bytes allocated, reserved, and inactive in split segments."""
    counters = subject.counters
    return counters.allocated_bytes, counters.reserved_bytes, counters.inactive_split_bytes


def allocated_mib(subject: CachingAllocator) -> float:
    """What torch.cuda.memory_allocated would show, in MiB."""
    return subject.counters.allocated_bytes / MIB


def reserved_mib(subject: CachingAllocator) -> float:
    """What torch.cuda.memory_reserved would show, in MiB."""
    return subject.counters.reserved_bytes / MIB
