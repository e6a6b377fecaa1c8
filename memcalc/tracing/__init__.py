"""The training step on fake tensors: shapes without values, on any machine. Importing this package loads no torch."""

from memcalc.tracing.trace import trace

__all__ = ["trace"]
