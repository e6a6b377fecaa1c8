"""The null CUDA device: PyTorch's real CUDA build on stub libraries that keep the books and do no work.

`run` runs a command on cards that are not there and says what it held; `sweep` does so at several micro-batch sizes;
`null_device` gives them to the child processes of a program or test suite, and `environment` to any process.
None imports torch; only the hook that runs inside the user's own process does.
"""

from memcalc.nullcuda.context import null_device
from memcalc.nullcuda.dry_run import run
from memcalc.nullcuda.launcher import environment
from memcalc.nullcuda.result import DryRun
from memcalc.nullcuda.sweep import Sweep, sweep

__all__ = ["DryRun", "Sweep", "environment", "null_device", "run", "sweep"]
