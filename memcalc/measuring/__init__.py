"""The training step on a device that is there. Importing this loads no torch."""

from memcalc.measuring.measure import measure
from memcalc.measuring.measurement import Measurement

__all__ = ["Measurement", "measure"]
