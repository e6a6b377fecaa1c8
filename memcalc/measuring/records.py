"""Recordings: one JSON line a run, appended and never changed."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from memcalc.measuring.measurement import Measurement

RECORD_VERSION = 1


def to_record(measurement: Measurement) -> dict[str, Any]:
    """The line of a measurement; sums over `held` stay in the order in which phases ran."""
    return {
        "record": RECORD_VERSION,
        "date": measurement.date,
        "command": measurement.command,
        "device": asdict(measurement.device),
        "versions": measurement.versions,
        "allocator": measurement.allocator,
        "spec": measurement.spec.model_dump(mode="json"),
        "phases": [asdict(phase) for phase in measurement.phases],
        "parameters": measurement.parameters,
        "buffers": measurement.buffers,
        "outcome": measurement.outcome,
    }


def append(measurement: Measurement, path: Path) -> None:
    """Add the record to a file.

    One write of the whole line to a descriptor opened for appending: runs that share a file do not mix their lines,
    and an interrupted one leaves no half line.
    """
    line = json.dumps(to_record(measurement), separators=(",", ":"), ensure_ascii=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)
