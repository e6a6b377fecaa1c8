"""Predictions of today, and traces that were kept, against every record that `measure` made: tables of the docs."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from memcalc.measuring.records import RECORDS
from memcalc.validation.record_comparison import RecordComparison, compare_records, operator_differences, run_of
from memcalc.validation.summary import PredictedRecord, PredictionErrors, errors_of, predicted
from tools.markdown import table

RECORDINGS = Path(__file__).resolve().parents[1] / "benchmarks" / "recordings"
FOLDER = RECORDINGS / "measured"
TRACES = FOLDER / "traces"  # of memcalc measure --compare, a file for each file of records
GPUS = RECORDINGS / "gpu"  # a directory for each real GPU
LISTS = ("suite", "largest", "finetune", "drawn-20261125")  # what was measured there, alone on the GPU

PARTS = ("device", "build", "steps", "again")  # of a run, as its record tells them


def groups() -> dict[str, list[dict[str, Any]]]:
    """The records of each device and PyTorch."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in (*sorted(FOLDER.glob("*.jsonl")), *of_gpus()):
        for record in RECORDS.read(path):
            found.setdefault(group_of(record), []).append(record)
    return found


def of_gpus(*names: str) -> list[Path]:
    """The files of lists that real GPUs have, card by GPU; without names of all that were measured alone."""
    return [path for name in names or LISTS for path in sorted(GPUS.glob(f"*/{name}.jsonl"))]


def group_of(record: dict[str, Any]) -> str:
    """The records that are listed together."""
    device = record["device"]
    return f"{device['kind']}, {device['name']}, torch {record['versions']['torch']}"


@lru_cache(maxsize=1)
def compared() -> tuple[RecordComparison, ...]:
    """Return comparisons of records with stored traces; no trace is run."""
    names = [path.name for path in sorted(FOLDER.glob("*.jsonl")) if (TRACES / path.name).exists()]
    return tuple(compare_records(FOLDER / name, TRACES / name, ()) for name in names)


def predictions() -> dict[tuple[str, str], list[PredictedRecord]]:
    """Runs that ended, by device and prediction: "estimate", and those of `kept_traces`."""
    found = {
        (name, "estimate"): [run for record in records if (run := predicted(record)) is not None]
        for name, records in groups().items()
    }
    return found | kept_traces()


def kept_traces() -> dict[tuple[str, str], list[PredictedRecord]]:
    """Runs that ended, by device and trace: "trace on fake", "trace on null"."""
    found: dict[tuple[str, str], list[PredictedRecord]] = {}
    for each in compared():
        for trace in ("fake", "null"):
            for run in each.of(trace):
                found.setdefault((group_of(run.record), f"trace on {trace}"), []).append(run)
    return found


def measured_table() -> str:
    """A line for each total and component of each group."""
    rows = [
        [name, prediction, each.name, str(len(each.shares)), *figures(each)]
        for (name, prediction), runs in predictions().items()
        for each in errors_of(runs)
    ]
    return table(["device", "prediction", "figure", "runs", "median", "p95", "maximum", "under", "exact"], rows)


def missed_table() -> str:
    """A line for each run with a traced peak that differs from the measured one."""
    runs = [(name, run) for name, found in predictions().items() for run in found if run.line is not None]
    rows = [
        [device, prediction, f"`{run_of(run.record)}`", f"{off:+,}", ", ".join(_apart(run)) or "-"]
        for (device, prediction), run in runs
        if (off := run.predicted.ledger.peak_bytes - run.measured.ledger.peak_bytes)
    ]
    if not rows:
        return f"All {len(runs)} traced peaks of runs that ended are byte-exact.\n"
    return table(["device", "prediction", "run", "trace minus measured", "by operator"], rows)


def _apart(run: PredictedRecord) -> list[str]:
    return [f"{name} {size:+,}" for name, size in operator_differences(run)[:3]]


def seconds_table() -> str:
    """How long a sitting took the host, by part."""
    heads = ["device", "runs", "context", "build", "measured run", "run with names", "rest", "total"]
    rows = []
    for name, records in groups().items():
        spent = [record["seconds"] for record in records if record.get("seconds")]
        if not spent:
            continue
        parts = [sum(each.get(part, 0.0) for each in spent) for part in PARTS]
        total = sum(each["all"] for each in spent)
        shares = [*parts, total - sum(parts), total]
        rows.append([name, str(len(spent)), *(f"{share:.1f} s" for share in shares)])
    return table(heads, rows)


def figures(errors: PredictionErrors) -> list[str]:
    """Return median, 95th percentile and maximum error, and the fractions of underestimated and of byte-exact runs."""
    shares = (errors.median, errors.p95, errors.worst)
    return [*(f"{share:+.3%}" for share in shares), f"{errors.under:.0%}", f"{errors.exact:.0%}"]


def probe_table() -> str:
    """Return a table of measured operator workspaces above 0 bytes, with the rule for each."""
    rows = [
        [
            line["operator"],
            line["shape"],
            line["direction"],
            f"{line['hidden']:,}",
            "" if line["rule"] == line["hidden"] else "none" if line["rule"] is None else f"{line['rule']:,}",
        ]
        for line in probes()
        if line["hidden"] or line["rule"]
    ]
    return table(["operator", "shape", "direction", "workspace bytes", "rule, if different"], rows)


def probes() -> list[dict[str, Any]]:
    """The recorded lines of benchmarks/probe.py on real GPUs; of an operator that was probed again, the last."""
    found = {
        (path.parent.name, line["operator"], line["shape"], line["direction"]): line
        for path in of_gpus("probe")
        for line in RECORDS.read(path)
    }
    return list(found.values())
