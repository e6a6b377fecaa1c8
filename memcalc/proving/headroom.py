"""Whether a run can fit, said before it starts."""

from __future__ import annotations

import os

from memcalc.errors import MemcalcError, Unavailable
from memcalc.estimation.estimate import estimate
from memcalc.measuring.measurement import Device
from memcalc.spec.spec import Spec
from memcalc.units import format_bytes

BEFORE_THE_FIRST_STEP = "zero_grad_1"


def weight_bytes(spec: Spec) -> int:
    """What the model, its optimizer and the inputs need before the first step, as estimated; 0: not known."""
    try:
        return estimate(spec).ledger.totals[BEFORE_THE_FIRST_STEP]
    except MemcalcError:
        return 0


def warning(spec: Spec, device: Device) -> str | None:
    """One sentence if the estimate says that the run cannot fit the device; None if it can, or nobody knows.

    Args:
        spec: the run.
        device: as `memcalc.measuring.client.Worker.describe` gives it.
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


def refuse(spec: Spec, device: Device) -> None:
    """Stops a run that the estimate says cannot fit.

    Raises:
        Unavailable: it says so.
    """
    found = warning(spec, device)
    if found is not None:
        raise Unavailable(f"{found} Override with --force.")


def host_bytes() -> int | None:
    """Memory of the host that is free now; None where the system does not tell."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None
