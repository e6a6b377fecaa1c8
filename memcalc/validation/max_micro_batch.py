"""Largest micro-batch that fits a GPU, predicted and found by measuring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memcalc.errors import MemcalcError
from memcalc.estimation.estimate import estimate
from memcalc.measuring.measurement import MeasuredDevice
from memcalc.measuring.result import gpu_named
from memcalc.spec.loading import load
from memcalc.spec.spec import Spec
from memcalc.units import largest_that_fits

MOST = 4096  # sequences; no GPU has memory for more
STEPS = 2  # the second step has the optimizer states


@dataclass
class LargestMicroBatch:
    """Largest micro-batch of one run."""

    overrides: str  # the run as in a suite
    predicted: int | None  # by the estimate and the trace; None: it cannot be predicted
    found: int | None = None  # by measuring, 0 if not even 1 fits; None: the search did not end

    def search(self, fits: Callable[[int], bool]) -> None:
        """Find it by measuring: outward from the predicted one, then by bisection."""
        self.found = largest_that_fits(fits, MOST, self.predicted or 1)


def predicted(spec: Spec, device: MeasuredDevice, alloc_conf: str = "") -> int | None:
    """Return the largest micro-batch that should fit; None if it cannot be predicted.

    The estimate of allocated memory gives an upper bound. Below it, traces on fake tensors go through the simulated
    allocator, which includes fragmentation.
    """
    if device.total_bytes is None:
        return None
    largest = estimated(spec, device.total_bytes - (device.context_bytes or 0))
    return largest if not largest else traced(spec, device, largest, alloc_conf)


def traced(spec: Spec, device: MeasuredDevice, most: int, alloc_conf: str = "") -> int:
    """Return the largest micro-batch up to `most` that fits the GPU in a trace; `most` for a GPU not in the table."""
    gpu = gpu_named(device)
    if gpu is None:
        return most
    from memcalc.tracing import trace

    def fits(batch: int) -> bool:
        larger = load(spec.model_dump(), (f"micro_batch_size={batch}",), gpu=gpu.name)
        found = trace(larger, STEPS, alloc_conf=alloc_conf)
        return found.result.fits is True

    return largest_that_fits(fits, most, most)


def estimated(spec: Spec, room: int) -> int | None:
    """Return the largest micro-batch with an estimated peak of at most `room` bytes; None: there are no formulas."""
    try:
        return largest_that_fits(lambda batch: peak(spec, batch) <= room, MOST)
    except MemcalcError:
        return None


def peak(spec: Spec, batch: int) -> int:
    """Return the estimated peak with another micro-batch, in bytes."""
    return estimate(load(spec.model_dump(), (f"micro_batch_size={batch}",))).ledger.peak_bytes
