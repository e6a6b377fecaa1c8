"""The null CUDA device: PyTorch's real CUDA build on stub libraries that keep the books and do no work.

`environment` gives any child process a card that is not there, and `run` runs a command on one and says what it held.
Neither imports torch; only the hook that runs inside the user's own process does.
"""

from memcalc.nullcuda.dry_run import run
from memcalc.nullcuda.launcher import environment
from memcalc.nullcuda.result import DryRun

__all__ = ["DryRun", "environment", "run"]
