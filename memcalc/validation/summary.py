"""Summary of many records: signed errors of current predictions, by total and by component."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any, NamedTuple

from memcalc.checking.comparison import compare
from memcalc.errors import MemcalcError
from memcalc.ledger.component import Component
from memcalc.ledger.ledger import Ledger, Rows
from memcalc.ledger.result import DeviceMemory, OutsideMemory, RankResult, Result, known
from memcalc.ledger.row import Row
from memcalc.ledger.textbook import textbook
from memcalc.measuring.measurement import DONE, MeasuredDevice
from memcalc.measuring.result import allocator_conf, gpu_named
from memcalc.spec.hardware.gpus import GpuSpec
from memcalc.spec.loading import load
from memcalc.validation.predictions import estimate_on_gpu

PERCENTILE = 95


class PredictionErrors(NamedTuple):
    """Errors of several predictions: predicted minus measured."""

    name: str  # a total, or a component
    shares: tuple[float, ...]  # relative errors: of the measured total, or, for a component, of the run's measured peak

    @property
    def median(self) -> float:
        """Median of the signed errors."""
        return statistics.median(self.shares)

    @property
    def p95(self) -> float:
        """95th percentile of the absolute errors."""
        ordered = sorted(map(abs, self.shares))
        return ordered[min(len(ordered) - 1, -(-len(ordered) * PERCENTILE // 100) - 1)]

    @property
    def worst(self) -> float:
        """The signed error with the largest absolute value."""
        return max(self.shares, key=abs)

    @property
    def exact(self) -> float:
        """Fraction of runs predicted byte-exactly."""
        return self.shares.count(0) / len(self.shares)

    @property
    def under(self) -> float:
        """Fraction of runs that used more memory than predicted."""
        return sum(share < 0 for share in self.shares) / len(self.shares)


class PredictedRecord(NamedTuple):
    """A record and its prediction."""

    record: dict[str, Any]
    predicted: Result
    measured: Result
    line: dict[str, Any] | None = None  # record of the prediction, if it is stored


def predicted(record: dict[str, Any]) -> PredictedRecord | None:
    """Return today's estimate for a record, under its PyTorch; None: the run did not complete, or has no formulas."""
    if record["outcome"] != DONE:
        return None
    gpu = gpu_named(device_of(record))
    try:
        spec = load(record["spec"], (), gpu=None if gpu is None else gpu.name)
        estimated = estimate_on_gpu(spec, allocator_conf(record["allocator"]), record["versions"]["torch"])
        return PredictedRecord(record, estimated, as_result(record, gpu))
    except MemcalcError:
        return None


def device_of(record: dict[str, Any]) -> MeasuredDevice:
    """Return the device of a record."""
    known = MeasuredDevice.__dataclass_fields__
    return MeasuredDevice(**{name: value for name, value in record["device"].items() if name in known})


def summary(records: Iterable[dict[str, Any]]) -> list[PredictionErrors]:
    """Return the errors of the estimate for some records."""
    return errors_of(filter(None, map(predicted, records)))


def errors_of(runs: Iterable[PredictedRecord]) -> list[PredictionErrors]:
    """Return the errors of predictions: allocated, reserved and device memory at the peak, then each component."""
    shares: dict[str, list[float]] = {}
    for found in runs:
        lines = compare(found.predicted, found.measured)
        truth = found.measured.ledger.peak_bytes
        for line in lines.totals:
            difference, base = line.excess(0, 1), line.sizes[1]
            if difference is not None and base:
                shares.setdefault(line.name, []).append(difference / base)
        for line in lines.components if "components" in found.record["phases"][0] else ():
            shares.setdefault(line.name, []).append((line.excess(0, 1) or 0) / truth)
    order = ["allocated", "reserved", "device", *(component.value for component in Component)]
    return [PredictionErrors(name, tuple(shares[name])) for name in order if name in shares]


def as_result(record: dict[str, Any], gpu: GpuSpec | None = None) -> Result:
    """Return a record, of a measured run or of a trace, as the result type of all commands: rows are components."""
    phases = record["phases"]
    rows = [
        Row(Component(name), "record", name, (size,), "uint8", 1, size, (phase["name"],), "measured", "record")
        for phase in phases
        for name, size in (phase.get("components") or {"temporaries": phase["peak_allocated_bytes"]}).items()
    ]
    ledger = Ledger([Rows(rows)], tuple(phase["name"] for phase in phases))
    reserved = _known(record.get("reserved_bytes"), *(phase.get("peak_reserved_bytes") for phase in phases))
    used = _known(record.get("device_bytes"), *(phase.get("device_bytes") for phase in phases))
    memory = DeviceMemory(max(reserved, default=None), max(used, default=None), OutsideMemory(0, 0, 0))
    spec = load(record["spec"], ())
    parameters = record["parameters"]
    return Result(
        source="trace" if "trace" in record else "measure",
        device=record["device"]["identifier"],
        spec=spec,
        parameters=parameters,
        trainable_parameters=record.get("trainable", parameters),
        buffer_elements=record["buffers"],
        textbook=textbook(spec),
        ranks=(RankResult({}, ledger, known(memory)),),
        confidence="measured",
        gpu=gpu,
        limits=(),
    )


def _known(*values: int | None) -> list[int]:
    return [value for value in values if value is not None]
