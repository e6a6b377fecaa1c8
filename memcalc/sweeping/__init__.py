"""Estimates of a grid of configurations in one call, byte-identical to `memcalc.estimate` of each one."""

from memcalc.sweeping.evaluation import blocks, evaluate
from memcalc.sweeping.grid import Axis, Grid
from memcalc.sweeping.table import Table

__all__ = ["Axis", "Grid", "Table", "blocks", "evaluate"]
