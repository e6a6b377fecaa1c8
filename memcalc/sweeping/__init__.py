"""Many estimates in one call: a grid of configurations, each sized as `memcalc.estimate` would size it, to the byte."""

from memcalc.sweeping.evaluation import blocks, evaluate
from memcalc.sweeping.grid import Axis, Grid
from memcalc.sweeping.table import Table

__all__ = ["Axis", "Grid", "Table", "blocks", "evaluate"]
