"""Memory measured on GPUs, compared with estimates, the null CUDA device and dry runs: tables of the docs."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import memcalc
from benchmarks.verdict_runs import loaded
from memcalc.ledger.verdict import Verdict
from memcalc.measuring.measurement import DONE
from memcalc.measuring.records import RECORDS
from memcalc.measuring.result import allocator_conf
from memcalc.spec.spec import Spec
from memcalc.units import format_bytes
from memcalc.validation.predictions import under
from memcalc.validation.record_comparison import run_of
from memcalc.validation.summary import PredictedRecord, errors_of, predicted
from memcalc.verdict.judge import judge
from tools.dry_runs import cases
from tools.markdown import table
from tools.measured_runs import LISTS, of_gpus
from tools.recorded_errors import compared, recorded_runs
from tools.recorded_tables import ANSWERS
from tools.sharded import recorded_ranks

BATCH = " micro_batch_size="  # a search says it after the run's own words
TORCH = "2.11.0"  # of the runs near the memory of a GPU
BESIDE = "null-"  # begins the file of the same runs on the null device, by the same PyTorch


def card_of(file: Path) -> str:
    """As the directory is called: "h100-80gb"."""
    return file.parent.name.partition("-torch")[0]


@lru_cache(maxsize=1)
def runs() -> tuple[tuple[str, str, PredictedRecord], ...]:
    """Every measured run that ended and has formulas, with its list and GPU."""
    return tuple(
        (name, card_of(file), found)
        for name in LISTS
        for file in of_gpus(name)
        for record in RECORDS.read(file)
        if (found := predicted(record)) is not None
    )


def real_summary() -> str:
    """A line for each list and total."""
    rows = []
    for name, card in dict.fromkeys((name, card) for name, card, _ in runs()):
        several = [run for each, where, run in runs() if (each, where) == (name, card)]
        for errors in errors_of(several)[:3]:
            figures = (errors.median, errors.p95, errors.worst)
            head = [f"`{name}`", f"`{card}`", str(len(several))] if errors.name == "allocated" else ["", "", ""]
            rows.append([*head, errors.name, *(f"{figure:+.3%}" for figure in figures), f"{errors.exact:.0%}"])
    return table(["list", "GPU", "runs", "figure", "median", "p95", "maximum", "exact"], rows)


def real_sentence() -> str:
    """The estimate's peak of allocated memory over all of them."""
    found = [abs(run.predicted.ledger.peak_bytes / run.measured.ledger.peak_bytes - 1) for _, _, run in runs()]
    families = len({run.record["spec"]["model"]["architecture"] for _, _, run in runs()})
    return (
        f"On {len(found)} training runs of {families} model families, measured on an H100 and an H200, the estimated "
        f"peak of allocated memory has a median error of {median(found):.3%} and a maximum error of {max(found):.2%}.\n"
    )


class Twin(NamedTuple):
    """A run on a GPU and on the null device, by the same PyTorch."""

    command: str
    real: dict[str, Any]
    null: dict[str, Any]

    @property
    def alike(self) -> bool:
        """Whether they are the same in every phase, and in how they ended."""
        keys = ("name", "peak_allocated_bytes", "peak_reserved_bytes")
        first, second = ([[phase[key] for key in keys] for phase in each["phases"]] for each in (self.real, self.null))
        return first == second and self.real["outcome"] == self.null["outcome"]

    def peaks(self, figure: str) -> tuple[int, int]:
        """The highest of a figure: real, null."""
        first, second = (max(phase[figure] for phase in each["phases"]) for each in (self.real, self.null))
        return first, second


def twins(name: str) -> list[tuple[str, list[Twin]]]:
    """A list's runs that both have, by GPU."""
    found = []
    for file in of_gpus(name):
        beside = file.with_name(BESIDE + file.name)
        null = {record["command"]: record for record in RECORDS.read(beside)} if beside.exists() else {}
        several = [
            Twin(record["command"], record, null[record["command"]])
            for record in RECORDS.read(file)
            if record["command"] in null
        ]
        if several:
            found.append((card_of(file), several))
    return found


def real_null() -> str:
    """Return a table of the null CUDA device compared with the GPU, by list of runs."""
    rows = []
    for name in LISTS:
        for card, several in twins(name):
            figures = []
            for figure in ("peak_allocated_bytes", "peak_reserved_bytes"):
                errors = [null / real - 1 for real, null in (twin.peaks(figure) for twin in several)]
                figures += [f"{sum(error == 0 for error in errors)}", f"{max(errors, key=abs):+.3%}"]
            rows.append(
                [f"`{name}`", f"`{card}`", str(len(several)), str(sum(twin.alike for twin in several)), *figures]
            )
    heads = [
        "list",
        "GPU",
        "runs",
        "byte-exact in every phase",
        "byte-exact peak allocated",
        "maximum difference",
        "byte-exact peak reserved",
        "maximum difference",
    ]
    return table(heads, rows)


def real_ranks() -> str:
    """One rank on a GPU, its peers a fake process group: estimates and recordings of the null device beside it."""
    null = {
        run.case: run.measured
        for folder in ("sharded", "split", "float8", "activation-offload", "offload")
        for run in recorded_ranks(folder)
    }
    by_kind: dict[str, list[tuple[float, float | None]]] = {}
    for file in of_gpus("ranks"):
        for record in map(json.loads, file.read_text().splitlines()):
            spec = memcalc.load(record["spec"] | {"hardware": {"gpu": card_of(file)}})
            held = max(record["phases"].values())
            known = null.get(record["case"])
            error = memcalc.estimate(spec).ledger.peak_bytes / held - 1
            by_kind.setdefault(_kind(spec), []).append((error, None if known is None else known / held - 1))
    rows = []
    for kind, several in sorted(by_kind.items()):
        errors, others = [error for error, _ in several], [beside for _, beside in several if beside is not None]
        figures = [f"{median(map(abs, errors)):.3%}", f"{max(errors, key=abs):+.3%}", str(len(others))]
        same = [str(sum(other == 0 for other in others)), f"{max(others, key=abs):+.3%}"] if others else ["", ""]
        rows.append([kind, str(len(several)), *figures, *same])
    heads = ["run type", "runs", "estimate: median error", "maximum error"]
    heads += ["runs also on the null device, torch 2.13", "same peak", "maximum difference"]
    return table(heads, rows)


def real_reserved() -> str:
    """Reserved memory of the first rank on a GPU: its replay, and recordings of the null device beside it."""
    null = {
        run.name: run.reserved
        for run in recorded_runs()
        if run.device == "null:h100-80gb" and run.spec.inference is None
    }
    by_kind: dict[str, list[tuple[float, float | None]]] = {}
    for run in recorded_runs():
        if run.device.startswith("null") or "engine=" not in run.name:
            continue
        error, beside = compared(run).error, null.get(run.name)
        by_kind.setdefault(_kind(run.spec), []).append((error, None if beside is None else run.reserved / beside - 1))
    rows = []
    for kind, several in sorted(by_kind.items()):
        row = [kind]
        for errors in [error for error, _ in several], [other for _, other in several if other is not None]:
            most = f"{max(errors, key=abs):+.2%}" if errors else ""
            row += [str(len(errors)), str(sum(error == 0 for error in errors)), most]
        rows.append(row)
    others = ["runs also on the null device, torch 2.13", "byte-exact", "GPU minus null device, maximum"]
    return table(["run type", "runs", "byte-exact replays", "GPU minus replay, maximum", *others], rows)


def near() -> list[tuple[dict[str, Any], Verdict]]:
    """Runs near the memory of a GPU, each with its verdict for the PyTorch version that ran."""
    records = [json.loads(line) for file in of_gpus("near-20261127") for line in file.read_text().splitlines()]
    return [(record, judge(under(loaded(record["case"]), TORCH))) for record in records]


def real_near() -> str:
    """How runs near the memory of a GPU ended, and their verdicts."""
    rows = [
        [f"`{record['case']}`", "completed" if record["outcome"] == DONE else "out of memory", ANSWERS[verdict.answer]]
        for record, verdict in near()
    ]
    return table(["run", "H100", "verdict"], rows)


def _kind(spec: Spec) -> str:
    training, spread = spec.training, spec.parallelism
    if spread.tensor_parallel > 1:
        return "layers split (DTensor)"
    if spread.ranks == 1:
        return "float8, one GPU" if training.fp8 != "none" else "offload activations, one GPU"
    words = [f"{spread.engine}, stage {spread.zero_stage}"]
    words += ["float8"] * (training.fp8 != "none") + ["adapters"] * (training.finetune != "full")
    return ", ".join(words)


def searches() -> dict[tuple[str, str], dict[int, dict[str, Any]]]:
    """The records of each search for the largest micro-batch, by GPU and run: by micro-batch, as they were tried."""
    found: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for file in of_gpus("suite", "largest"):
        for record in RECORDS.read(file):
            run, key, batch = run_of(record).partition(BATCH)
            if key:
                conf = allocator_conf(record["allocator"])
                words = f"{run} --alloc-conf {conf}" if conf else run
                found.setdefault((card_of(file), words), {})[int(batch)] = record
    return found


def real_largest() -> str:
    """The largest micro-batches, found by measuring from the predicted one on, which is tried first."""
    rows = []
    for (card, run), tried in searches().items():
        fits = max((batch for batch, record in tried.items() if record["outcome"] == DONE), default=0)
        fails = min((batch for batch, record in tried.items() if record["outcome"] != DONE), default=None)
        rows.append([f"`{run}`", f"`{card}`", str(next(iter(tried))), str(fits), "-" if fails is None else str(fails)])
    return table(["run", "GPU", "predicted", "largest that ran", "ran out of memory"], rows)


def real_scripts() -> str:
    """Training scripts on a GPU beside their dry runs: by the same PyTorch where that was recorded, else by 2.13."""
    rows = []
    for name, group in (("scripts", "single"), ("compiled", "compiled")):
        dry = {case["case"]: case for case in cases(group)}
        for file in of_gpus(name):
            beside = dry_peaks(file.with_name(BESIDE + file.name))
            for record in map(json.loads, file.read_text().splitlines()):
                if "allocated_bytes" not in record:
                    continue
                case = dry[record["case"]]
                ranks = case["record"]["ranks"]
                release, peak = beside.get(
                    record["case"], ("2.13.0", max(ranks, key=lambda rank: rank["device_bytes"]))
                )
                held, reserved = (
                    peak[f"{kind}_bytes"] / record[f"{kind}_bytes"] - 1 for kind in ("allocated", "reserved")
                )
                figures = [format_bytes(record["allocated_bytes"], "GiB"), release, f"{held:+.3%}", f"{reserved:+.3%}"]
                rows.append([case["title"], f"`{card_of(file)}`", *figures])
    heads = ["script", "GPU", "allocated", "torch of the dry run", "allocated, difference", "reserved, difference"]
    return table(heads, rows)


def dry_peaks(file: Path) -> dict[str, tuple[str, dict[str, int]]]:
    """Release of PyTorch and peak of each dry run of a file; nothing where there is none."""
    lines = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    return {line["case"]: (line["torch"].partition("+")[0], line["document"]["peak"]) for line in lines}


def real_outside() -> str:
    """Device memory outside PyTorch's allocator: the context, and what is loaded later, by phase."""
    rows = []
    for file in of_gpus():
        several = [record for record in RECORDS.read(file) if record["outcome"] == DONE]
        context = sorted({record["device"]["context_bytes"] for record in several})
        grown = [
            max(phase["device_bytes"] - phase["reserved_bytes"] for phase in record["phases"]) for record in several
        ]
        words = [
            " to ".join(format_bytes(size, "MiB") for size in dict.fromkeys((min(of), max(of))))
            for of in (context, grown)
        ]
        rows.append([f"`{card_of(file)}`", f"`{file.stem}`", str(len(several)), *words])
    return table(["GPU", "list", "runs", "context", "at the end, outside the allocator"], rows)


TABLES = {
    "real-summary": real_summary,
    "real-sentence": real_sentence,
    "real-null": real_null,
    "real-ranks": real_ranks,
    "real-reserved": real_reserved,
    "real-near": real_near,
    "real-largest": real_largest,
    "real-scripts": real_scripts,
    "real-outside": real_outside,
}
