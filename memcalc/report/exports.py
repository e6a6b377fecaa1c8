"""Export of a run for other programs, chosen by suffix."""

from __future__ import annotations

from pathlib import Path

from memcalc.errors import InputError
from memcalc.report.plots.files import check_target
from memcalc.report.tables.recorded_run import RecordedRun

SUFFIXES = (".pickle", ".json", ".jsonl")


def write_export(path: Path, run: RecordedRun, name: str, *, timed: bool = True) -> None:
    """Write a run for another program.

    Args:
        path: .pickle is a memory snapshot of PyTorch, for pytorch.org/memory_viz and torch.cuda._memory_viz; .json a
            Chrome trace, for ui.perfetto.dev and chrome://tracing; .jsonl memcalc's own events, for `memcalc replay`.
        run: what happened.
        name: name of the run.
        timed: whether its times are those of a device.

    Raises:
        InputError: as `check_target`; or a snapshot was requested from a device without PyTorch's allocator.
    """
    check_target(path, SUFFIXES)
    suffix = path.suffix.lower()
    if suffix == ".pickle":
        from memcalc.allocator.pytorch.dump import write_snapshot

        if run.history is None:
            raise InputError(
                f"{path.name}: a memory snapshot records the CUDA allocator, which this run did not use.",
                "Write a Chrome trace (.json), or trace with CUDA's semantics.",
            )
        write_snapshot(path, run.history)
    elif suffix == ".json":
        from memcalc.events.chrome import write_chrome_trace

        write_chrome_trace(path, run.curve, name, timed=timed)
    else:
        from memcalc.events import write_events

        write_events(path, run.timeline.events)
