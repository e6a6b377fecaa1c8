"""What if: a run's events through other allocators and other settings, and what they would save."""

from memcalc.replaying.replaying import replaying
from memcalc.replaying.result import Recommendation, Replay, Trial

__all__ = ["Recommendation", "Replay", "Trial", "replaying"]
