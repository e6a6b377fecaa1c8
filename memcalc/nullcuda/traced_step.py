"""Child process on the null device that records one training step, run by `tracing.py` with `python -m`.

traced_step SPEC.json EVENTS.jsonl REPORT.json STEPS [FILE.py:INPUTS]
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path


def main(spec_file: str, events_file: str, report_file: str, steps: str, inputs: str | None = None) -> None:
    """Record the step, and write the events and a report to two files."""
    gc.disable()  # start-up produces no garbage
    from memcalc.errors import MemcalcError
    from memcalc.events import write_events
    from memcalc.spec.loading import load
    from memcalc.step.skip_compiler import without_compiler, without_meta_kernels

    spec = load(json.loads(Path(spec_file).read_text()), ())
    if spec.parallelism.ranks == 1:  # DTensor derives shapes on fake tensors
        without_meta_kernels()
    without_compiler()
    import torch

    from memcalc.recorder.real_device import record_instrumented
    from memcalc.step.loop import TrainingRun
    from memcalc.step.python_file import inputs_of_file

    gc.freeze()
    gc.enable()
    report: dict[str, object] = {"torch": torch.__version__}
    try:
        device = torch.device("cuda", 0)
        if spec.parallelism.ranks > 1:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            ranks = spec.parallelism.ranks
            torch.distributed.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
        run = TrainingRun(spec, device, None if inputs is None else inputs_of_file(inputs))
        recorded = record_instrumented(run, int(steps))
        report["notes"] = run.notes
        report["died"] = recorded.failed
        report["sizes"] = recorded.sizes
        report["peak_allocated"] = torch.cuda.max_memory_allocated(device)
        report["peak_reserved"] = torch.cuda.max_memory_reserved(device)
        write_events(events_file, recorded.events)
    except MemcalcError as error:
        report["refused"] = [type(error).__name__, *map(str, error.args)]
    Path(report_file).write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
