"""Verification of a plan on emulated devices: planned and allocated memory of each phase."""

from __future__ import annotations

from typing import NamedTuple

from memcalc.errors import InputError, Unavailable
from memcalc.ledger.result import Result
from memcalc.progress import Progress, silent
from memcalc.recomputation.recommendation import RecomputeResult

DEVICES = ("fake", "null")
STEPS = 2  # the second one is the steady state


class DeviceVerification(NamedTuple):
    """The result of one device."""

    device: str  # "fake:cuda" or "null:a100-80gb"; "null" if it is not available
    phases: tuple[tuple[str, int, int], ...]  # each with its planned and its traced bytes
    reserved: tuple[int, int]  # peak reserved memory: planned, and traced
    missing: str = ""  # why the device is not available; "" if it is

    @property
    def planned(self) -> int:
        """The largest planned phase."""
        return max(planned for _, planned, _ in self.phases)

    @property
    def traced(self) -> int:
        """The largest traced phase."""
        return max(traced for _, _, traced in self.phases)


def verified(
    planning: RecomputeResult,
    devices: tuple[str, ...] = DEVICES,
    python: str | None = None,
    progress: Progress = silent,
) -> list[DeviceVerification]:
    """Trace the planned step: on fake tensors, and with PyTorch's CUDA build if the null CUDA device is available.

    Args:
        planning: the plan.
        devices: "fake", "null" or both.
        python: an interpreter with a CUDA build of torch; None: $MEMCALC_NULL_PYTHON, else this one.
        progress: called with the progress of the traces.

    Raises:
        InputError: an unknown device.
        Unavailable: fake tensors need torch; or only the null device was requested, and is not available.
    """
    for device in devices:
        if device not in DEVICES:
            raise InputError(f"device = {device!r} is not known to --verify.", "Name fake or null.", "--device")
    found = []
    for device in devices:
        try:
            result = _traced(planning, device, python, progress)
        except Unavailable as error:
            if device == "fake" or devices == ("null",):
                raise
            found.append(DeviceVerification(device, (), (0, 0), str(error)))
            continue
        planned, traced = planning.result.ledger.totals, result.ledger.totals
        phases = tuple((phase, amount, traced[phase]) for phase, amount in planned.items() if phase in traced)
        reserved = tuple(each.headline.reserved_bytes or 0 for each in (planning.result, result))
        found.append(DeviceVerification(result.device or device, phases, (reserved[0], reserved[1])))
    return found


def _traced(planning: RecomputeResult, device: str, python: str | None, progress: Progress) -> Result:
    spec = planning.result.spec
    if device == "null":
        from memcalc.nullcuda.tracing import trace as trace_on_null

        return trace_on_null(spec, STEPS, python=python, progress=progress).result
    from memcalc.tracing import trace

    return trace(spec, STEPS, progress=progress).result
