"""Allocator replay: a run's events under other allocators and settings, and what they would save."""

from memcalc.replaying.replaying import replaying
from memcalc.replaying.result import Recommendation, Replay, Trial

__all__ = ["Recommendation", "Replay", "Trial", "replaying"]
