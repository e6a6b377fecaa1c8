"""A trace on fake tensors in a child process, for commands that must not import torch.

The child runs `python -m memcalc.tracing.child SPEC.json EVENTS.jsonl REPORT.json STEPS`.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from memcalc.directories import temporary_directory
from memcalc.errors import InputError, Unavailable
from memcalc.events import read_events
from memcalc.files import write_text
from memcalc.recorder.recording import Recording
from memcalc.spec.spec import Spec

ROOT = Path(__file__).parents[2]
FIELDS = ("device", "parameters", "trainable", "buffers", "readbacks", "has_allocator", "notes")


def record_in_child(spec: Spec, steps: int) -> Recording:
    """Run the step of a spec on fake tensors in a child process; this process imports no torch.

    Raises:
        InputError: the step cannot run the spec.
        Unavailable: the child ended without a result.
    """
    with temporary_directory("memcalc-trace-") as folder:
        spec_file, events, report = (folder / name for name in ("spec.json", "events.jsonl", "report.json"))
        write_text(spec_file, json.dumps(spec.model_dump(mode="json")))
        command = [sys.executable, "-P", "-m", "memcalc.tracing.child", *map(str, (spec_file, events, report, steps))]
        path = os.pathsep.join((str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])))
        variables = os.environ | {"PYTHONPATH": path}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)  # noqa: S603 -- memcalc itself
        found = _report(report, done)
        return Recording(
            events=tuple(read_events(events)),
            host_events=tuple(read_events(Path(f"{events}.host"))),
            **found,
        )


def _report(file: Path, done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    try:
        report: dict[str, Any] = json.loads(file.read_bytes())
    except (OSError, ValueError):
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise Unavailable(
            f"the trace ended with exit code {done.returncode}: {lines[-1] if lines else 'no message'} "
            "Try `memcalc trace`, which runs in its own process."
        ) from None
    if "refused" in report:
        kind, *words = report["refused"]
        raise Unavailable(words[0]) if kind != "InputError" else InputError(*words)
    return {name: tuple(report[name]) if name == "notes" else report[name] for name in FIELDS}


def main(spec_file: str, events_file: str, report_file: str, steps: str) -> None:
    """Trace, and write the events and the other fields of the recording to files."""
    gc.disable()  # start-up produces no garbage
    from memcalc.errors import MemcalcError
    from memcalc.events import write_events
    from memcalc.spec.loading import load
    from memcalc.step.skip_compiler import without_compiler
    from memcalc.tracing.trace import record

    without_compiler()
    gc.freeze()
    gc.enable()
    try:
        recording = record(load(json.loads(Path(spec_file).read_text())), int(steps))
        report: dict[str, Any] = {name: getattr(recording, name) for name in FIELDS}
        write_events(events_file, recording.events)
        write_events(f"{events_file}.host", recording.host_events)
    except InputError as error:
        report = {"refused": ["InputError", error.problem, error.remedy, error.location]}
    except MemcalcError as error:
        report = {"refused": [type(error).__name__, str(error)]}
    Path(report_file).write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
