"""Framework allocators, and streams of events replayed through them. Importing this loads no torch."""

from memcalc.allocator.driver import Driver
from memcalc.allocator.pytorch.caching import CachingAllocator
from memcalc.allocator.pytorch.diary import History, history
from memcalc.allocator.pytorch.settings import Settings, parse_settings
from memcalc.allocator.pytorch.versions import Version, parse_version
from memcalc.allocator.replay import replay
from memcalc.allocator.result import Failure, Moment, ReplayResult

__all__ = [
    "CachingAllocator",
    "Driver",
    "Failure",
    "History",
    "Moment",
    "ReplayResult",
    "Settings",
    "Version",
    "history",
    "parse_settings",
    "parse_version",
    "replay",
]
