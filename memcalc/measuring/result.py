"""A measurement as the result that all verbs share: measured sums, split as far as tensors can be named."""

from __future__ import annotations

from collections.abc import Iterable

from memcalc.ledger.component import Component
from memcalc.ledger.ledger import Ledger, Rows
from memcalc.ledger.result import Outside, RankResult, Result
from memcalc.ledger.row import Row
from memcalc.ledger.textbook import textbook
from memcalc.measuring.measurement import OUT_OF_MEMORY, MeasuredPhase, Measurement
from memcalc.spec.cards import find_card

CITATION = "measured"
NOT_TOLD_APART = (
    "measured: what has no name (activations, temporaries, library workspaces, block rounding, gradients made in the "
    "phase itself) is one row a phase"
)


def to_result(measurement: Measurement) -> Result:
    """The figures as a ledger: each phase sums to its measured peak."""
    phases = measurement.phases
    ledger = Ledger([Rows(rows(phases))], tuple(phase.name for phase in phases))
    allocated = ledger.peak_bytes
    reserved = most(phase.peak_reserved_bytes for phase in phases)
    on_device = most(phase.device_bytes for phase in phases)
    outside = Outside(
        cached_segments=0 if reserved is None else reserved - allocated,
        device_context=0 if reserved is None or on_device is None else on_device - reserved,
        communication_library=0,
    )
    gpu = measurement.spec.hardware.gpu
    notes = ("The run ended out of memory: later phases are missing.",) if measurement.outcome == OUT_OF_MEMORY else ()
    return Result(
        source="measure",
        device=measurement.device.identifier,
        spec=measurement.spec,
        parameters=measurement.parameters,
        trainable_parameters=measurement.parameters,
        buffer_elements=measurement.buffers,
        textbook=textbook(measurement.spec),
        ranks=(RankResult({"pipeline_stage": 0}, ledger, reserved, on_device, outside),),
        confidence="measured",
        card=None if gpu is None else find_card(gpu),
        not_modelled=(NOT_TOLD_APART,),
        notes=notes,
    )


def rows(phases: tuple[MeasuredPhase, ...]) -> list[Row]:
    """A row for each component, dtype and size, with the phases in which it was held."""
    alive: dict[tuple[str, str, int, int], list[str]] = {}
    rest: list[Row] = []
    for phase in phases:
        for held in phase.held:
            alive.setdefault((held.component, held.dtype, held.elements, held.bytes), []).append(phase.name)
        rest.append(unattributed(phase))
    named = [
        Row(Component(component), "model", component, (elements,), dtype, 1, size, tuple(when), "measured", CITATION)
        for (component, dtype, elements, size), when in alive.items()
    ]
    return named + [row for row in rest if row.bytes]


def unattributed(phase: MeasuredPhase) -> Row:
    """What one phase held at its peak beside the tensors that can be named."""
    size = phase.peak_allocated_bytes - sum(held.bytes for held in phase.held)
    keeps = phase.name.startswith(("forward", "loss", "backward"))
    component = Component.ACTIVATIONS if keeps else Component.TEMPORARIES
    return Row(
        component, "unattributed", component.value, (size,), "uint8", 1, size, (phase.name,), "measured", CITATION
    )


def most(values: Iterable[int | None]) -> int | None:
    """The largest; None where the device has no such figure."""
    known = [value for value in values if value is not None]
    return max(known, default=None)
