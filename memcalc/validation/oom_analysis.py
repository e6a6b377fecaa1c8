"""Analysis of a measured run that ran out of memory: the simulated allocator's result, and changes that fit."""

from __future__ import annotations

import io

from memcalc.allocator import replay
from memcalc.diagnosis.diagnosis import diagnose
from memcalc.errors import MemcalcError
from memcalc.events.event import EventType
from memcalc.measuring.measurement import Measurement
from memcalc.measuring.result import allocator_conf
from memcalc.suggestions.run_overrides import written_out
from memcalc.units import format_bytes
from memcalc.validation.predicted_vs_measured import predicted_spec

MOST_CHANGES = 3


def opinion(measurement: Measurement) -> str:
    """Return the simulated allocator's result in a sentence, then the cheapest changes that fit; "" for a CPU."""
    return " ".join(part for part in (simulated(measurement), fitting(measurement)) if part)


def simulated(measurement: Measurement) -> str:
    """Return whether the simulated PyTorch allocator fails at the same request on the same device, as a sentence."""
    device = measurement.device
    if device.total_bytes is None or not any(event.kind is EventType.OOM for event in measurement.events):
        return ""
    gone = (device.others_bytes or 0) + (device.context_bytes or 0)
    found = replay(
        measurement.events,
        allocator_conf(measurement.allocator),
        measurement.versions["torch"],
        device.total_bytes,
        used=gone,
    )
    if found.failure is None:
        return (
            "The simulated allocator would have served every request "
            f"({format_bytes(found.peak_reserved, 'GiB')} reserved at most): memory outside PyTorch caused the failure."
        )
    event = measurement.events[found.failure.event]
    if event.kind is EventType.OOM:
        return f"The simulated allocator fails at the same request, of {format_bytes(event.bytes, 'MiB')}."
    where = f"{event.phase}, at {event.operator}" + (f" of {event.module}" if event.module else "")
    return f"The simulated allocator fails earlier, in {where}."


def fitting(measurement: Measurement) -> str:
    """Return changes that would have fitted, as a sentence, by the estimate scaled to the run's allocated bytes."""
    message = (measurement.message or "").encode()
    try:
        explained = diagnose("the run", io.BytesIO(message), written_out(predicted_spec(measurement))).explained
    except MemcalcError:  # the message has no figures, or the run has no formulas
        return ""
    if explained is None:
        return ""
    changes = [change for change in explained.changes if change.fits][:MOST_CHANGES]
    if not changes:
        return "No single change that memcalc knows makes it fit."
    words = [
        f"{' '.join(f'--set {override}' for override in change.overrides)} ({format_bytes(change.needed, 'GiB')})"
        for change in changes
    ]
    return f"Would have fitted: {'; or '.join(words)}."
