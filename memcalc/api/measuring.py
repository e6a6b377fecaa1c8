"""Run the step on a real GPU or CPU, and compare it with predictions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from memcalc.api.sources import Source, load_to_run
from memcalc.progress import Progress, silent

if TYPE_CHECKING:
    from memcalc.measuring import Measurement
    from memcalc.validation.predicted_vs_measured import PredictedVsMeasured
    from memcalc.validation.record_comparison import RecordComparison
    from memcalc.validation.suite import SuiteOutcome


def measure(
    source: Source,
    *overrides: str,
    gpu: str | None = None,
    device: str | None = None,
    steps: int = 3,
    record: str | Path | None = None,
    alloc_conf: str = "",
    python: str | None = None,
    headroom: bool = False,
    force: bool = False,
    **fields: Any,
) -> Measurement:
    """Measure the memory of a real training step in a separate process. Needs torch.

    Args:
        source: as for `load`.
        overrides: as for `load`.
        gpu: as for `load`.
        device: "cuda", "cuda:1" or "cpu"; "null:<gpu>" for a simulated GPU; default: the GPU.
        steps: optimizer steps to run.
        record: a file to append the results to, for later comparison.
        alloc_conf: PYTORCH_CUDA_ALLOC_CONF of the run; "": the value of the environment.
        python: for a null device, an interpreter with a CUDA build of torch; None: $MEMCALC_NULL_PYTHON or this one.
        headroom: do not start a run that exceeds the device by its estimate.
        force: start the run even if it may not fit or other processes use the device.
        fields: as for `load`.
    """
    from memcalc.validation.single_run import MeasureOptions, measure_run

    how = MeasureOptions(device, steps, record, alloc_conf, python, headroom, force)
    return measure_run(load_to_run(source, *overrides, gpu=gpu, **fields), how)


def measure_suite(
    suite: str | Path,
    record: str | Path,
    *,
    device: str | None = None,
    python: str | None = None,
    progress: Progress = silent,
) -> SuiteOutcome:
    """Measure many runs sequentially, without the runs that `record` already has for this device.

    Args:
        suite: a file of runs, see docs/guides/measure.md.
        record: the file to append each record to, as soon as its run ends.
        device: as for `measure`.
        python: as for `measure`.
        progress: called with the current run.
    """
    from memcalc.validation.suite import load_suite, run_suite
    from memcalc.validation.workers import worker_for

    runs = load_suite(suite)
    with worker_for(device, python) as (worker, name):
        return run_suite(runs, worker, name, Path(record), progress)


def compare_records(
    records: str | Path,
    *traces: str,
    record: str | Path | None = None,
    python: str | None = None,
    progress: Progress = silent,
) -> RecordComparison:
    """Compare traces with records of measured runs. Nothing is measured.

    Args:
        records: a file that `measure` wrote.
        traces: "fake", "null" or both; default: only the estimate.
        record: the file to read traces from and append them to; None: next to the records, with "-traces" in its name.
        python: as for `measure`.
        progress: called with the current run.
    """
    from memcalc.validation.record_comparison import compare_records as lay_beside

    source = Path(records)
    kept = source.with_name(f"{source.stem}-traces{source.suffix}") if record is None else Path(record)
    return lay_beside(source, kept, traces, python, progress)


def compare_measured(
    measurement: Measurement, *traces: str, python: str | None = None, progress: Progress = silent
) -> PredictedVsMeasured:
    """Compare a measured run with the estimate, and with traces on simulated devices.

    Args:
        measurement: a result of `measure`.
        traces: "fake", "null" or both; default: only the estimate.
        python: as for `measure`.
        progress: called with the progress of the traces.
    """
    from memcalc.validation.predicted_vs_measured import predicted_vs_measured as lay_beside

    return lay_beside(measurement, traces, python, progress)
