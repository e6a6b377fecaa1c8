"""Run the training step of a configuration on CUDA, unrecorded: `any_model_step.py CONFIG STEPS FIELD=VALUE...`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from memcalc.spec.loading import load
from memcalc.step.loop import TrainingRun


class Silent:
    """An observer that notes nothing."""

    @contextmanager
    def phase(self, _: str) -> Iterator[None]:
        """See `memcalc.step.loop.Observer`."""
        yield


TrainingRun(load(sys.argv[1], sys.argv[3:]), torch.device("cuda", 0)).execute(int(sys.argv[2]), Silent())
