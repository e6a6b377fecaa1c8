"""Explain why a run ran out of memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from memcalc.api.sources import Source, run_of
from memcalc.progress import Progress, silent

if TYPE_CHECKING:
    from memcalc.diagnosis.diagnosis import Diagnosis


def oom(
    log: str | Path,
    config: Source | None = None,
    *overrides: str,
    gpu: str | None = None,
    report: int = 1,
    progress: Progress = silent,
) -> Diagnosis:
    """Explain why the run that wrote `log` ran out of memory, and list remedies.

    Args:
        log: a path, or "-" for standard input; logs of any size are read as a stream.
        config: the run's configuration, as for `load`; adds numbers to the remedies.
        overrides: as for `load`.
        gpu: as for `load`.
        report: number of the report to explain, from 1.
        progress: called with the MiB of the log read so far.
    """
    from memcalc.diagnosis.diagnosis import diagnose
    from memcalc.diagnosis.log_reader import open_log, with_progress

    run = None if config is None else run_of(config, *overrides, gpu=gpu, verb="oom")
    with open_log(log) as (name, stream):
        return diagnose(name, with_progress(stream, progress), run, report)
