"""Preflight check: whether a run can fit, before it starts."""

from __future__ import annotations

import os

from memcalc.errors import MemcalcError, Unavailable
from memcalc.estimation.estimate import estimate
from memcalc.measuring.measurement import MeasuredDevice
from memcalc.spec.spec import Spec
from memcalc.units import format_bytes

BEFORE_THE_FIRST_STEP = "zero_grad_1"


def weight_bytes(spec: Spec) -> int:
    """Return the estimated bytes of model, optimizer and inputs before the first step; 0 if unknown."""
    try:
        return estimate(spec).ledger.totals[BEFORE_THE_FIRST_STEP]
    except MemcalcError:
        return 0


def warning(spec: Spec, device: MeasuredDevice) -> str | None:
    """Return one sentence if the estimate exceeds the device's memory; None if it fits or is unknown.

    Args:
        spec: the run.
        device: as returned by `memcalc.measuring.client.Worker.describe`.
    """
    total = host_bytes() if device.kind == "cpu" else device.total_bytes
    try:
        needed = estimate(spec).ledger.peak_bytes
    except MemcalcError:
        return None
    if total is None or needed <= total:
        return None
    return (
        f"{spec.name} cannot fit {device.identifier}: the estimate is {format_bytes(needed, 'GiB')} allocated at the "
        f"peak, and the device has {format_bytes(total, 'GiB')}."
    )


def check_fits(spec: Spec, device: MeasuredDevice) -> None:
    """Reject a run if its estimate exceeds the device's memory.

    Raises:
        Unavailable: it does.
    """
    found = warning(spec, device)
    if found is not None:
        raise Unavailable(f"{found} Override with --force.")


def host_bytes() -> int | None:
    """Return the free host memory in bytes; None if the system does not report it."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None
