"""Allocator replay: a run's events under other allocators and settings, and what they would save."""

from memcalc.replaying.allocator_replay import replay_source
from memcalc.replaying.result import Recommendation, ReplayComparison, Trial

__all__ = ["Recommendation", "ReplayComparison", "Trial", "replay_source"]
