"""Largest micro-batch that fits, found by measuring: outward from the predicted one, then by bisection."""

from __future__ import annotations

from typing import Any

from memcalc.errors import MemcalcError
from memcalc.estimation.estimate import estimate
from memcalc.measuring.measurement import DONE, MeasuredDevice
from memcalc.measuring.result import gpu_named
from memcalc.spec.loading import load
from memcalc.spec.spec import Spec
from memcalc.units import largest_that_fits

MOST = 4096  # sequences; no GPU has memory for more
STEPS = 2  # the second step has the optimizer states


class MicroBatchSearch:
    """Search for the largest micro-batch of one run: measure the batch that `next` returns, and report it to `tried`.

    Args:
        overrides: the run as in a suite.
        spec: the run, with any micro-batch.
        device: the device that it must fit.
        alloc_conf: PYTORCH_CUDA_ALLOC_CONF of the run.
    """

    def __init__(self, words: str, spec: Spec, device: MeasuredDevice, alloc_conf: str = "") -> None:
        self.overrides = words
        self.predicted = predicted(spec, device, alloc_conf)
        self.fits: int | None = None
        self.fails: int | None = None
        self._stride = 1

    @property
    def largest(self) -> int | None:
        """The largest micro-batch that fits, 0 if none does; None while unknown."""
        if self.fails == 1:
            return 0
        known = self.fits is not None and (self.fails == self.fits + 1 or self.fits >= MOST)
        return self.fits if known else None

    def next(self) -> int | None:
        """Return the micro-batch to try next; None when the largest is known."""
        if self.largest is not None:
            return None
        if self.fits is None and self.fails is None:
            return max(1, self.predicted or 1)
        if self.fails is None:
            assert self.fits is not None
            return min(MOST, self.fits + self._stride)
        if self.fits is None:
            return max(1, self.fails - self._stride)
        return (self.fits + self.fails) // 2

    def tried(self, batch: int, record: dict[str, Any]) -> None:
        """Record the outcome of a micro-batch. Strides double while only one bound is known."""
        first = self.fits is None and self.fails is None
        if record["outcome"] == DONE:
            self.fits = max(batch, self.fits or 0)
        else:
            self.fails = min(batch, self.fails or MOST + 1)
        if not first:
            self._stride *= 2


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
    low, high = 0, 1
    try:
        while high <= MOST and peak(spec, high) <= room:
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if peak(spec, middle) <= room else (low, middle)
    except MemcalcError:
        return None
    return low


def peak(spec: Spec, batch: int) -> int:
    """Return the estimated peak with another micro-batch, in bytes."""
    return estimate(load(spec.model_dump(), (f"micro_batch_size={batch}",))).ledger.peak_bytes
