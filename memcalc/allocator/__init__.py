"""Models of framework allocators, and allocator replay of event streams. Importing this loads no torch.

Names are imported on first use, because an estimate needs only one allocator of one framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memcalc.allocator.driver import Driver as Driver
    from memcalc.allocator.event_replay import replay as replay
    from memcalc.allocator.pytorch.caching import CachingAllocator as CachingAllocator
    from memcalc.allocator.pytorch.history import History as History
    from memcalc.allocator.pytorch.history import history as history
    from memcalc.allocator.pytorch.settings import Settings as Settings
    from memcalc.allocator.pytorch.settings import parse_settings as parse_settings
    from memcalc.allocator.pytorch.versions import Version as Version
    from memcalc.allocator.pytorch.versions import parse_version as parse_version
    from memcalc.allocator.result import CounterSample as CounterSample
    from memcalc.allocator.result import FailedAllocation as FailedAllocation
    from memcalc.allocator.result import ReplayResult as ReplayResult

_HOMES = {
    "CachingAllocator": "memcalc.allocator.pytorch.caching",
    "CounterSample": "memcalc.allocator.result",
    "Driver": "memcalc.allocator.driver",
    "FailedAllocation": "memcalc.allocator.result",
    "History": "memcalc.allocator.pytorch.history",
    "ReplayResult": "memcalc.allocator.result",
    "Settings": "memcalc.allocator.pytorch.settings",
    "Version": "memcalc.allocator.pytorch.versions",
    "history": "memcalc.allocator.pytorch.history",
    "parse_settings": "memcalc.allocator.pytorch.settings",
    "parse_version": "memcalc.allocator.pytorch.versions",
    "replay": "memcalc.allocator.event_replay",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'memcalc.allocator' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
