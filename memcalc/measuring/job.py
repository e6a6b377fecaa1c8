"""Jobs of a measuring process, and its protocol: one JSON object per line in both directions."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from memcalc.spec.spec import Spec


@dataclass(frozen=True)
class Job:
    """One run."""

    spec: Spec  # the run to measure
    steps: int  # optimizer steps
    device: str | None  # "cuda", "cuda:1" or "cpu"; None: the GPU
    alloc_conf: str  # PYTORCH_CUDA_ALLOC_CONF of the run; "": as in the environment
    events: str  # file that every allocation is written to
    force: bool = False  # run on a device that is busy, or too small for the weights alone
    weight_bytes: int = 0  # estimated bytes before the first step; 0: unknown

    def line(self) -> str:
        """Return the job as a line of the protocol."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return encoded(values | {"spec": self.spec.model_dump(mode="json")})


def job_from(line: str) -> Job:
    """Return the job of a line."""
    from memcalc.spec.loading import load

    values: dict[str, Any] = json.loads(line)
    return Job(**values | {"spec": load(values["spec"], ())})


def encoded(values: dict[str, Any]) -> str:
    """Return values as one line of JSON."""
    return json.dumps(values, separators=(",", ":"), ensure_ascii=False, default=asdict) + "\n"
