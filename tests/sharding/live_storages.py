"""What a recorded run still holds when its last step has ended."""

from __future__ import annotations

from memcalc.allocator.pytorch.constants import STREAM_SHIFT
from memcalc.layout.stages import Stage
from memcalc.simulation.simulated_run import run_requests
from memcalc.spec.spec import Spec


def live_at_the_end(spec: Spec, stage: Stage) -> dict[int, int]:
    """Return the bytes of the live storages, by their number."""
    live: dict[int, int] = {}
    number = 0
    for stretch in run_requests(spec, stage).stretches:
        for change in stretch.script:
            if change < 0:
                del live[~change]
            else:
                live[number] = change % (1 << STREAM_SHIFT)
                number += 1
    return live
