"""What a measured run gives: raw figures by phase, and who measured them on what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memcalc.ledger.result import Result
from memcalc.spec.spec import Spec

DONE, OUT_OF_MEMORY = "done", "out of memory"


@dataclass(frozen=True, slots=True)
class Holding:
    """Tensors of one component and one dtype that were certainly alive at a phase's peak."""

    component: str
    dtype: str
    elements: int
    bytes: int


@dataclass(frozen=True, slots=True)
class MeasuredPhase:
    """One phase. Of several micro-batches the one with the highest peak. Bytes; None where a device has no such figure.

    Args:
        name: as in memcalc/ledger/phases.py.
        peak_allocated_bytes: most that was allocated at once.
        end_allocated_bytes: still allocated when the phase ended.
        reserved_bytes: held by the caching allocator at the end.
        peak_reserved_bytes: most that it held.
        device_bytes: in use on the device at the end, by whatever process.
        held: what could be named; the rest is activations and temporaries.
    """

    name: str
    peak_allocated_bytes: int
    end_allocated_bytes: int
    reserved_bytes: int | None
    peak_reserved_bytes: int | None
    device_bytes: int | None
    held: tuple[Holding, ...]


@dataclass(frozen=True, slots=True)
class Device:
    """The device that was measured.

    Args:
        kind: "cpu", "cuda", or "null cuda": PyTorch's CUDA build on accounting-only stub libraries.
        identifier: "cpu", "cuda:0" or "null:<card>".
        name: as the driver gives it.
        total_bytes: of its memory, for a GPU.
        driver: CUDA version of the driver, for a GPU.
    """

    kind: str
    identifier: str
    name: str
    total_bytes: int | None
    driver: str | None


@dataclass(frozen=True, slots=True)
class Measurement:
    """A measured run.

    Args:
        spec: what ran.
        device: where.
        versions: of Python, torch, CUDA and transformers.
        allocator: settings of the caching allocator from the environment; "" when there are none.
        command: what was typed.
        date: UTC, ISO 8601.
        phases: in the order of the run.
        parameters: elements of all nn.Parameters, tied ones once.
        buffers: elements of all buffers.
        outcome: "done" or "out of memory".
    """

    spec: Spec
    device: Device
    versions: dict[str, str]
    allocator: str
    command: str
    date: str
    phases: tuple[MeasuredPhase, ...]
    parameters: int
    buffers: int
    outcome: str = DONE

    @property
    def peak(self) -> MeasuredPhase:
        """The phase that needed most."""
        return max(self.phases, key=lambda phase: phase.peak_allocated_bytes)

    def to_result(self) -> Result:
        """The same figures in the shape that all verbs share."""
        from memcalc.measuring.result import to_result

        return to_result(self)

    def to_record(self) -> dict[str, Any]:
        """The same figures as they are kept in a file of recordings."""
        from memcalc.measuring.records import to_record

        return to_record(self)
