"""Predictions of a measured run: the estimate, and traces without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memcalc.errors import InputError, MemcalcError
from memcalc.ledger.result import Result
from memcalc.measuring.measurement import Measurement
from memcalc.measuring.result import allocator_conf, gpu_of
from memcalc.progress import Progress, silent
from memcalc.spec.loading import load
from memcalc.spec.spec import Spec
from memcalc.validation.predictions import estimate_on_gpu

TRACES = ("fake", "null")


@dataclass(frozen=True)
class PredictedVsMeasured:
    """Predictions of one run, and its measurement.

    Args:
        estimate: the estimate from formulas; None: there are no formulas for the run.
        traces: the requested traces that could run: on fake tensors, on the null device.
        measurement: the measured run.
        missing: predictions that could not be made, each with the reason.
    """

    estimate: Result | None
    traces: tuple[Result, ...]
    measurement: Measurement
    missing: tuple[str, ...]

    @property
    def results(self) -> tuple[Result, ...]:
        """All results, the measured one last."""
        first = () if self.estimate is None else (self.estimate,)
        return (*first, *self.traces, self.measurement.result)


def predicted_vs_measured(
    measurement: Measurement,
    traces: Sequence[str] = ("fake",),
    python: str | None = None,
    progress: Progress = silent,
) -> PredictedVsMeasured:
    """Predict a measured run, for the GPU that it was measured on.

    Args:
        measurement: the measured run.
        traces: "fake", "null" or both.
        python: for the null device, see `memcalc.nullcuda.tracing.trace`.
        progress: called with the progress of the traces.
    """
    check_traces(traces)
    spec = predicted_spec(measurement)
    on_cpu, settings = measurement.device.kind == "cpu", allocator_conf(measurement.allocator)
    missing: list[str] = []
    estimated: Result | None = None
    try:
        estimated = estimate_on_gpu(spec, settings, measurement.versions["torch"])
    except MemcalcError as error:
        missing.append(f"estimate: {error}")
    results = []
    for name in traces:
        try:
            results.append(traced(name, spec, measurement.steps, settings, python, on_cpu=on_cpu, progress=progress))
        except MemcalcError as error:
            missing.append(f"trace on {name}: {error}")
    return PredictedVsMeasured(estimated, tuple(results), measurement, tuple(missing))


def check_traces(traces: Sequence[str]) -> None:
    """Check the names of traces.

    Raises:
        InputError: a name is unknown.
    """
    for name in traces:
        if name not in TRACES:
            raise InputError(f"trace = {name!r} is not known.", f"Name {' or '.join(TRACES)}.", "--trace")


def predicted_spec(measurement: Measurement) -> Spec:
    """Return the run with the GPU that it was measured on; unchanged if the table has no such GPU."""
    gpu = gpu_of(measurement)
    return measurement.spec if gpu is None else load(measurement.spec.model_dump(), (), gpu=gpu.name)


def traced(
    name: str,
    spec: Spec,
    steps: int,
    settings: str,
    python: str | None,
    *,
    on_cpu: bool,
    progress: Progress = silent,
) -> Result:
    """Return the trace of a run.

    Args:
        name: "fake" or "null".
        spec: the run, with its GPU.
        steps: optimizer steps.
        settings: PYTORCH_CUDA_ALLOC_CONF.
        python: for the null device, see `memcalc.nullcuda.tracing.trace`.
        on_cpu: whether to emulate CPU kernels.
        progress: called with the progress of the trace.

    Raises:
        MemcalcError: the run cannot be traced there.
    """
    if name == "fake":
        from memcalc.tracing import trace

        return trace(spec, steps, "cpu" if on_cpu else "cuda", settings, progress).result
    if on_cpu:
        raise InputError("a null device simulates CUDA, but the run was on a CPU.")
    from memcalc.nullcuda.tracing import trace as trace_on_null

    return trace_on_null(spec, steps, settings, python, progress).result
