"""Measurement of the training step on a real device. Importing this package loads no torch."""

from memcalc.measuring.measure import measure
from memcalc.measuring.measurement import Measurement

__all__ = ["Measurement", "measure"]
