"""Records of measured runs: one JSON line each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from memcalc.errors import InputError
from memcalc.json_lines import JsonLines
from memcalc.ledger.component import Component
from memcalc.ledger.ledger import Ledger
from memcalc.measuring.measurement import Measurement

RECORD_VERSION = 2  # version 1 had components of nameable tensors only (`held`); version 2 has all components

WORKSPACE = Component.LIBRARY_WORKSPACE.value

RECORDS = JsonLines("record", RECORD_VERSION, "record of a measured run", "records", "--record", "measure")


def to_record(measurement: Measurement) -> dict[str, Any]:
    """Return the record of a measurement."""
    ledger = measurement.result.ledger
    return {
        "record": RECORD_VERSION,
        "date": measurement.date,
        "command": measurement.command,
        "device": asdict(measurement.device),
        "versions": measurement.versions,
        "allocator": measurement.allocator,
        "spec": measurement.spec.model_dump(mode="json"),
        "steps": measurement.steps,
        "phases": [asdict(phase) | {"components": _components(ledger, phase.name)} for phase in measurement.phases],
        "operators": by_operator(ledger, ledger.peak_phase),
        "parameters": measurement.parameters,
        "trainable": measurement.trainable,
        "buffers": measurement.buffers,
        "outcome": measurement.outcome,
        "message": measurement.message,
        "rank": measurement.rank,
        "ranks": measurement.ranks,
        "seconds": {part: round(each, 3) for part, each in measurement.seconds.items()},
    }


def by_operator(ledger: Ledger, phase: str) -> dict[str, int]:
    """Return the live bytes at a phase's peak by operator, largest first; library workspaces are one entry."""
    found: dict[str, int] = {}
    for row in ledger.live_rows(phase):
        name = WORKSPACE if row.component is Component.LIBRARY_WORKSPACE else row.tensor
        found[name] = found.get(name, 0) + row.bytes
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _components(ledger: Ledger, phase: str) -> dict[str, int]:
    return {component.value: size for component, size in ledger.components(phase).items()}


def read_measured(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of measured runs in a file, in order, each with all required parts.

    Raises:
        InputError: as `JsonLines.read`; or a part of a line is missing or has the wrong type.
    """
    for number, record in enumerate(RECORDS.read(path), start=1):
        wrong = next(filter(None, (_wrong(record, part, value_type) for part, value_type in _PARTS.items())), None)
        if wrong is None and not record["phases"]:
            wrong = "phases"
        wrong = wrong or _wrong_size(record) or _wrong_size(record["device"])
        for phase in record["phases"] if wrong is None else ():
            wrong = wrong or _wrong(phase, "name", str) or _wrong(phase, "peak_allocated_bytes", int)
            wrong = wrong or _wrong_size(phase)
            if wrong is None and "components" in phase and not _are_sizes(phase["components"]):
                wrong = "components"
        if wrong is not None:
            raise InputError(
                f"this line is not a record of a measured run: {wrong} is missing or wrong.",
                "Name a file that `measure` wrote.",
                f"{path}:{number}",
            )
        yield record


# Required parts of a record of a measured run, by path.
_PARTS: dict[str, type] = {
    "command": str,
    "device": dict,
    "device.kind": str,
    "device.name": str,
    "device.identifier": str,
    "versions": dict,
    "versions.torch": str,
    "allocator": str,
    "spec": dict,
    "phases": list,
    "parameters": int,
    "buffers": int,
    "outcome": str,
}
_KINDS = {value_type.value for value_type in Component}


def _wrong(record: Any, part: str, value_type: type) -> str | None:
    """Return the part if it does not have this type; None if it does."""
    value = record
    for name in part.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return None if isinstance(value, value_type) and not (value_type is int and isinstance(value, bool)) else part


def _wrong_size(values: dict[str, Any]) -> str | None:
    """Return the first `*_bytes` key with a value other than a whole number or null; None if there is none."""
    sizes = (name for name in values if name.endswith("_bytes"))
    return next((name for name in sizes if values[name] is not None and type(values[name]) is not int), None)


def _are_sizes(components: Any) -> bool:
    return isinstance(components, dict) and all(
        name in _KINDS and type(size) is int for name, size in components.items()
    )
