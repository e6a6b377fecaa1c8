"""Comparison of traces with stored measurements: nothing is measured again, and no GPU is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memcalc.errors import InputError, MemcalcError, NotWritten
from memcalc.ledger.result import Result
from memcalc.measuring.measurement import DONE
from memcalc.measuring.records import RECORD_VERSION, RECORDS, by_operator, read_measured
from memcalc.measuring.result import allocator_conf, gpu_named
from memcalc.progress import Progress, silent
from memcalc.spec.loading import load
from memcalc.validation.predicted_vs_measured import check_traces, traced
from memcalc.validation.suite import key_of_record
from memcalc.validation.summary import PredictedRecord, as_result, device_of


@dataclass(frozen=True)
class RecordComparison:
    """Traces compared with records of measured runs.

    Args:
        records: records of the measured runs.
        traces: kinds of traces: "fake", "null".
        trace_records: of each trace, by type of trace and key of the measured run.
        missing: label and error of each run that could not be traced.
        fresh: number of traces made by this call.
        unkept: why the last trace could not be written, which ended the work; None: all are kept.
    """

    records: tuple[dict[str, Any], ...]
    traces: tuple[str, ...]
    trace_records: dict[tuple[str, str], dict[str, Any]]
    missing: tuple[tuple[str, str], ...]
    fresh: int
    unkept: NotWritten | None = None

    def of(self, trace: str) -> list[PredictedRecord]:
        """Return the measured runs that completed, each with its trace."""
        found = []
        for record in self.records:
            made = self.trace_records.get((trace, key_of_record(record)))
            if made is not None and record["outcome"] == DONE:
                gpu = gpu_named(device_of(record))
                found.append(
                    PredictedRecord(
                        record, as_result(made | {"spec": record["spec"]}, gpu), as_result(record, gpu), made
                    )
                )
        return found

    def predicted_failures(self, trace: str) -> tuple[int, int]:
        """Return how many out-of-memory runs the trace predicts not to fit, and how many of them were traced."""
        dead = [record for record in self.records if record["outcome"] != DONE]
        made = [
            found for record in dead if (found := self.trace_records.get((trace, key_of_record(record)))) is not None
        ]
        return sum(found["fits"] is False for found in made), len(made)


def compare_records(
    records: Path,
    kept: Path,
    traces: Sequence[str],
    python: str | None = None,
    progress: Progress = silent,
) -> RecordComparison:
    """Trace every run in a file of records that has no trace yet; each trace is written before the next one starts.

    Args:
        records: a file that `measure` wrote.
        kept: the file that traces are read from and appended to.
        traces: "fake", "null" or both.
        python: for the null device, see `memcalc.nullcuda.tracing.trace`.
        progress: called with the current run.

    Raises:
        InputError: a file has other content than records.
    """
    check_traces(traces)
    RECORDS.check(kept)
    if not records.is_file():
        raise InputError(
            "the file does not exist or has no records.",
            "Name a file that `memcalc measure --record` wrote.",
            str(records),
        )
    by_rank = {key_of_record(record) + str(record.get("rank")): record for record in read_measured(records)}
    measured = tuple(by_rank.values())
    made = {(str(line["trace"]), str(line.get("of"))): line for line in RECORDS.read(kept) if "trace" in line}
    missing: list[tuple[str, str]] = []
    unkept: NotWritten | None = None
    fresh = 0
    wanted = dict.fromkeys((trace, key_of_record(record)) for trace in traces for record in measured)
    by_key = {key_of_record(record): record for record in measured}
    for number, (trace, key) in enumerate(wanted):
        progress(f"{trace}: {run_of(by_key[key])}", number, len(wanted))
        if (trace, key) in made:
            continue
        try:
            line = trace_of(by_key[key], trace, python)
        except MemcalcError as error:
            missing.append((f"{trace}: {run_of(by_key[key])}", str(error)))
            continue
        made[trace, key] = line
        fresh += 1
        try:
            RECORDS.append((line,), kept)
        except NotWritten as error:
            unkept = error
            break
    progress("done", len(wanted), len(wanted))
    return RecordComparison(measured, tuple(traces), made, tuple(missing), fresh, unkept)


def trace_of(record: dict[str, Any], trace: str, python: str | None = None) -> dict[str, Any]:
    """Return the record of a trace of a measured run, for the GPU that it was measured on.

    Raises:
        MemcalcError: the run cannot be traced.
    """
    device = device_of(record)
    gpu = gpu_named(device)
    spec = load(record["spec"], (), gpu=None if gpu is None else gpu.name)
    on_cpu, settings = device.kind == "cpu", allocator_conf(record["allocator"])
    return as_line(traced(trace, spec, record["steps"], settings, python, on_cpu=on_cpu), record, trace)


def as_line(result: Result, record: dict[str, Any], trace: str) -> dict[str, Any]:
    """Return the record of a trace: the phases of a measured run, and bytes by operator at the measured peak."""
    from memcalc.measuring.devices import software

    ledger = result.ledger
    peak = max(record["phases"], key=lambda phase: phase["peak_allocated_bytes"])["name"]
    return {
        "record": RECORD_VERSION,
        "trace": trace,
        "of": key_of_record(record),
        "command": record["command"],
        "device": {"kind": trace, "identifier": result.device, "name": ""},
        "versions": software() if trace == "fake" else {},  # the null device runs another Python
        "phases": [
            {
                "name": name,
                "peak_allocated_bytes": ledger.totals[name],
                "components": {kind.value: size for kind, size in ledger.components(name).items()},
            }
            for name in ledger.phases
        ],
        "operators": by_operator(ledger, peak) if peak in ledger.phases else {},
        "reserved_bytes": result.headline.reserved_bytes,
        "device_bytes": result.headline.device_bytes,
        "fits": result.fits,
        "parameters": result.parameters,
        "trainable": result.trainable_parameters,
        "buffers": result.buffer_elements,
    }


def run_of(record: dict[str, Any]) -> str:
    """Return a run in the syntax of a suite: "gpt2 b=4"."""
    command: str = record["command"]
    return command.partition("measure ")[2].replace("--set ", "").partition(" --")[0]


def operator_differences(found: PredictedRecord) -> list[tuple[str, int]]:
    """Return the operators with different bytes at the measured peak, and trace minus measured; largest first."""
    traced_bytes, measured_bytes = ((line or {}).get("operators", {}) for line in (found.line, found.record))
    apart = {
        name: traced_bytes.get(name, 0) - measured_bytes.get(name, 0) for name in {**measured_bytes, **traced_bytes}
    }
    return sorted(((name, size) for name, size in apart.items() if size), key=lambda item: (-abs(item[1]), item[0]))
