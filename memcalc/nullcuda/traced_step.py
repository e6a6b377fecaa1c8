"""Runs inside a child process on the null device: one training step, recorded. `python -m` it; see `tracing.py`.

traced_step SPEC.json EVENTS.jsonl REPORT.json STEPS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(spec_file: str, events_file: str, report_file: str, steps: str) -> None:
    """Record, and leave the events and what else is known in two files."""
    import torch

    from memcalc.errors import MemcalcError
    from memcalc.events import write_events
    from memcalc.nullcuda.uncompiled import without_compiler
    from memcalc.recorder.history import HistoryRecorder
    from memcalc.recorder.observer import RecordingObserver
    from memcalc.spec.loading import load
    from memcalc.step.loop import TrainingRun

    without_compiler(torch)
    report: dict[str, object] = {"torch": torch.__version__}
    try:
        device = torch.device("cuda", 0)
        spec = load(json.loads(Path(spec_file).read_text()), ())
        if spec.parallelism.data_parallel > 1:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            ranks = spec.parallelism.data_parallel
            torch.distributed.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
        run = TrainingRun(spec, device)
        recorder = HistoryRecorder(device)
        try:
            with recorder:
                run.execute(int(steps), RecordingObserver(run, recorder))
        except torch.OutOfMemoryError as error:
            report["died"] = str(error)
        report["sizes"] = run.sizes()
        report["peak_allocated"] = torch.cuda.max_memory_allocated(device)
        report["peak_reserved"] = torch.cuda.max_memory_reserved(device)
        write_events(events_file, recorder.events())
    except MemcalcError as error:
        report["refused"] = [type(error).__name__, *map(str, error.args)]
    Path(report_file).write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
