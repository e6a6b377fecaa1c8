"""Many estimates in one call: a grid of configurations, each sized as `memcalc.estimate` would size it, to the byte."""

from memcalc.engine.evaluation import blocks, evaluate
from memcalc.engine.grid import Axis, Grid
from memcalc.engine.table import Table

__all__ = ["Axis", "Grid", "Table", "blocks", "evaluate"]
