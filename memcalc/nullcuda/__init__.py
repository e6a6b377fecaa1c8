"""The null CUDA device: PyTorch's CUDA build on stub libraries that account for memory and compute nothing.

`run` runs a command on emulated GPUs and reports its memory; `sweep` does so at several micro-batch sizes;
`null_device` gives emulated GPUs to the child processes of a program or test suite, and `environment` to any process.
None of them imports torch; only the hook inside the user's own process does.
"""

from memcalc.nullcuda.context import null_device
from memcalc.nullcuda.dry_run import run
from memcalc.nullcuda.launcher import environment
from memcalc.nullcuda.result import DryRun
from memcalc.nullcuda.sweep import Sweep, sweep

__all__ = ["DryRun", "Sweep", "environment", "null_device", "run", "sweep"]
