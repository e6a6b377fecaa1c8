"""Framework allocators, and streams of events replayed through them. Importing this loads no torch."""

from memcalc.allocator.caching import CachingAllocator
from memcalc.allocator.driver import Driver
from memcalc.allocator.replay import replay
from memcalc.allocator.result import Failure, Moment, ReplayResult
from memcalc.allocator.settings import Settings, parse_settings
from memcalc.allocator.versions import Version, parse_version

__all__ = [
    "CachingAllocator",
    "Driver",
    "Failure",
    "Moment",
    "ReplayResult",
    "Settings",
    "Version",
    "parse_settings",
    "parse_version",
    "replay",
]
