"""Child process of one cell: `python -m memcalc.cells.child REQUEST.json ANSWER.json`; see `local.py`.

Standard input is a pipe from the parent process. When the parent ends, the pipe closes, and the child kills itself
and every process that it started.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from memcalc.cells.cell import CellResult, Request
from memcalc.errors import InputError, MemcalcError

UNAVAILABLE = "unavailable"  # key in place of an answer: the environment lacks something that every cell needs


def main(request_file: str, answer_file: str) -> None:
    """Run the cell and write its complete answer in one step."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    start = time.monotonic()
    request: Request = json.loads(Path(request_file).read_text())
    found: dict[str, Any]
    try:
        answer = dry_run(request) if request["by"] == "dry-run" else trace(request)
        found = asdict(answer) | {"seconds": round(time.monotonic() - start, 2)}
    except InputError as error:
        found = asdict(CellResult("invalid", reason=str(error)))
    except MemcalcError as error:
        found = {UNAVAILABLE: str(error)}
    part = Path(f"{answer_file}.part")
    part.write_text(json.dumps(found))
    part.rename(answer_file)


def end_with_parent() -> None:
    """Wait until the parent has ended, then kill this process and its process group."""
    while os.read(0, 1):
        pass
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)  # a trace's child is in the group; a dry run has a supervisor
    os._exit(1)


def trace(request: Request) -> CellResult:
    """Trace a step on fake tensors or on the null device, and return its figures."""
    from memcalc.spec.loading import load

    spec = load(request["spec"], ())
    if request["by"] == "null":
        from memcalc.nullcuda.tracing import trace as trace_on_null

        traced = trace_on_null(spec, request["steps"], python=request["python"])
    else:
        from memcalc.step.skip_compiler import without_compiler

        without_compiler()
        from memcalc.tracing import trace as trace_on_fake

        traced = trace_on_fake(spec, request["steps"])
    result = traced.result
    return CellResult(
        "measured",
        result.verdict,
        result.ledger.peak_bytes,
        result.headline.reserved_bytes,
        result.headline.device_bytes,
        result.headroom_bytes,
        result.ledger.peak_phase,
    )


def dry_run(request: Request) -> CellResult:
    """Run a command on the null device, and return its figures."""
    from memcalc.nullcuda import run
    from memcalc.nullcuda.result import FAILED, INTERRUPTED, TIMED_OUT, failure_line

    os.chdir(request["directory"])
    result = run(
        request["command"], request["gpu"], gpus=request["gpus"], timeout=request["timeout"], **request["options"]
    )
    reason = result.doubt if result.fits is None else ""
    if result.outcome in (FAILED, TIMED_OUT, INTERRUPTED):
        reason = result.outcome if result.failure is None else failure_line(result.failure)
    return CellResult(
        "failed" if result.outcome in (FAILED, TIMED_OUT, INTERRUPTED) else "measured",
        result.answer,
        result.allocated_bytes if result.peak else None,
        result.reserved_bytes if result.peak else None,
        result.device_bytes if result.peak else None,
        result.headroom_bytes,
        reason=reason,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
