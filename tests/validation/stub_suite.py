"""Runs a suite with runs of 20 ms and without torch: a program for tests that interrupt it.

stub_suite.py SUITE.yaml RECORDS.jsonl
"""

from __future__ import annotations

import sys
from pathlib import Path

from memcalc.measuring.client import Worker
from memcalc.validation.suite import load_suite, run_suite

# The real worker: it forks for each job, and answers what a CPU run could have.
WORKER = """
import sys, time, types
from memcalc.events import write_events
from memcalc.events.event import Event, EventType
from memcalc.ledger.component import Component

DEVICE = {"kind": "cpu", "identifier": "cpu", "name": "stub"}
VERSIONS = {"torch": "2.13.0"}

def answer(job):
    time.sleep(0.02)
    write_events(job.events, [
        Event(EventType.PHASE, phase="model"), Event(EventType.ALLOC, 0, 64, component=Component.WEIGHTS, phase="model"),
    ])
    phase = {"name": "model", "peak_allocated_bytes": 64, "end_allocated_bytes": 64}
    return {"device": DEVICE, "versions": VERSIONS, "allocator": "", "phases": [phase], "parameters": 32,
            "trainable": 32, "buffers": 0, "outcome": "done", "message": None}

child = types.ModuleType("memcalc.measuring.run_process")
child.answer, child.describe = answer, lambda name: {"device": DEVICE, "versions": VERSIONS}
sys.modules["torch"] = sys.modules["torch._dynamo"] = types.ModuleType("torch")
import memcalc.measuring
sys.modules["memcalc.measuring.run_process"] = memcalc.measuring.run_process = child
from memcalc.measuring.worker import main
main()
"""


def main(suite: str, records: str) -> None:
    """Run it, to the end."""
    with Worker([sys.executable, "-c", WORKER]) as worker:
        outcome = run_suite(load_suite(suite), worker, "cpu", Path(records))
    sys.stderr.writelines(f"{run}: {reason}\n" for run, reason in outcome.refused)
    sys.stdout.write(f"{len(outcome.records)} {outcome.fresh}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
