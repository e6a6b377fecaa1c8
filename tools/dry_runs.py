"""Recorded dry runs as tables of the documentation: what benchmarks/dry_runs.py wrote, beside its list of cases."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from memcalc.spec.hardware.gpus import LOADER
from memcalc.units import format_number
from tools.markdown import table

BUILD = "torch===2.13.0 triton==3.7.1"  # where an environment of dry_runs.yaml does not say otherwise
BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@cache
def listed() -> dict[str, Any]:
    """Return the cases of each group; parsed in PyYAML's Python they take half a second."""
    found: dict[str, Any] = yaml.load((BENCHMARKS / "dry_runs.yaml").read_text(), Loader=LOADER)  # noqa: S506 -- a SafeLoader
    return found


def cases(group: str) -> list[dict[str, Any]]:
    """The cases of a group, each with its record; those that were not recorded are left out."""
    lines = (BENCHMARKS / "recordings" / "dry-runs" / f"{group}.jsonl").read_text().splitlines()
    recorded = {record["case"]: record for record in map(json.loads, lines)}
    return [case | {"record": recorded[case["case"]]} for case in listed()[group] if case["case"] in recorded]


def peaks(group: str) -> str:
    """One line a case: the memory of its fullest GPU."""
    head = ["run", "GPU", "allocated GiB", "reserved GiB", "device GiB", "seconds"]
    return table(head, [_row(case) for case in cases(group)])


def _row(case: dict[str, Any]) -> list[object]:
    record = case["record"]
    if not record["good"]:
        return [case["title"], _card(record), f"{record['outcome']}", "-", "-", record["seconds"]]
    return [case["title"], _card(record), *_figures(record), record["seconds"]]


def _card(record: dict[str, Any]) -> str:
    return f"`{record['card']}`" if record["gpus"] == 1 else f"{record['gpus']} × `{record['card']}`"


def _figures(record: dict[str, Any]) -> list[str]:
    """Peaks of the GPU that needs most."""
    fullest = max(record["ranks"], key=lambda rank: rank["device_bytes"], default=None)
    kinds = ("allocated", "reserved", "device")
    return ["-" for _ in kinds] if fullest is None else [format_number(fullest[f"{k}_bytes"], "GiB") for k in kinds]


def drawn() -> list[dict[str, Any]]:
    """The programs of benchmarks/programs that belong to the table, each with its record."""
    found = []
    for case in listed()["drawn"]:
        path = BENCHMARKS / "recordings" / "programs" / case["seed"] / f"{case['family']}.jsonl"
        records = (json.loads(line) for line in path.read_text().splitlines())
        found.append(case | {"record": next(record for record in records if record["number"] == case["number"])})
    return found


def programs(group: str) -> str:
    """One line a program: its verdict, and the memory of its fullest GPU."""
    head = ["program", "package", "GPU", "verdict", "allocated GiB", "reserved GiB", "device GiB"]
    rows: list[list[object]] = []
    for case in drawn() if group == "drawn" else cases(group):
        record = case["record"]
        verdict = (record["verdict"] or "nothing measured").replace("-", " ").replace("unknown", "cannot say")
        if verdict == "fits" and not record["good"]:
            verdict = "fits, until it stopped"
        rows.append([case["title"], case["package"], _card(record), verdict, *_figures(record)])
    return table(head, rows)


def drawn_releases() -> str:
    """How each program of benchmarks/programs is run again, and the releases it ran on."""
    rows: list[list[object]] = []
    for case in drawn():
        versions = case["record"]["versions"].items()
        known = ", ".join(f"{name} {version}" for name, version in versions if version and name != "memcalc")
        rows.append([f"`{case['family']} --seed {case['seed']} --number {case['number']}`", known])
    return table(["`python -m benchmarks.programs.record`", "versions"], rows)


def reasons() -> str:
    """The programs that did not finish with a verdict, each with its reason."""
    found = [
        (case["title"], case["record"]["doubt"] or ": ".join(case["record"]["failures"][0]))
        for case in cases("scripts")
        if case["record"]["doubt"] or not case["record"]["good"]
    ]
    return "\n".join(f"- {title}: {why.rstrip('.')}." for title, why in found) + "\n" if found else "None.\n"


def environments() -> str:
    """What is installed for the published programs, in two steps."""
    installed = listed()["environments"]
    rows: list[list[object]] = []
    for name in dict.fromkeys(case["environment"] for case in cases("scripts")):
        found = installed[name]
        asked = found if isinstance(found, dict) else {"install": found, "build": BUILD}
        rows.append([name, f"`{asked['install']}`", f"`{asked['build']}`"])
    return table(["environment", "`pip install`", "`pip install --no-deps`"], rows)


def compiled() -> str:
    """Return a table of allocated bytes at the peak: compiled steps compared with eager ones."""
    eager = {case["case"].partition("-")[0]: _allocated(case) for case in cases("single") if "-plain" in case["case"]}

    def row(case: dict[str, Any]) -> list[object]:
        before, now = eager[case["case"].partition("-")[0]], _allocated(case)
        if not case["record"]["good"]:
            return [case["title"], format_number(before, "GiB"), case["record"]["outcome"], "-"]
        return [case["title"], format_number(before, "GiB"), format_number(now, "GiB"), f"{now / before - 1:+.0%}"]

    return table(["compiled", "eager GiB", "compiled GiB", "difference"], [row(case) for case in cases("compiled")])


def _allocated(case: dict[str, Any]) -> int:
    return max((int(rank["allocated_bytes"]) for rank in case["record"]["ranks"]), default=0)


def commands(group: str) -> str:
    """Each case's command, and what had to be set."""
    lines = []
    for case in cases(group):
        record = case["record"]
        variables = "".join(f"{name}={value} " for name, value in record["variables"].items())
        versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
        options = {"random_weights": "--random-weights", "skip_init": "--skip-init"}
        flags = [f"--gpu {record['card']}"]
        flags += [f"--gpus {record['gpus']}"] if record["gpus"] > 1 else []
        for name, value in record["options"].items():
            flags.append(options[name] if value is True else f"--{name.replace('_', '-')} {value}")
        command = record["command"].replace("{bin}/", "").replace("{checkouts}/", "")
        about = (
            f"Source: {case['source']}. Environment: {case['environment']}. Versions: {versions}. Set: {case['set']}."
        )
        lines += [
            f"### {case['title']}\n",
            f"{about}\n",
            f"```bash\n{variables}memcalc dry-run {' '.join(flags)} -- {command}\n```\n",
        ]
    return "\n".join(lines)


def builds() -> str:
    """Builds of PyTorch that the device was built for: the allocator's tests, and two models' steps."""
    lines = (BENCHMARKS / "recordings" / "dry-runs" / "torch-builds.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    head = ["torch", "CUDA", "tests of the allocator", "GPT-2 small GiB", "Llama-3-8B GiB"]
    rows: list[list[object]] = []
    for record in records:
        tests = ", ".join(f"{number} {word}" for word, number in record["tests"].items())
        peaks = [record["steps"][name]["allocated_bytes"] for name in ("GPT-2 small", "Llama-3-8B")]
        figures = [format_number(peak, "GiB") for peak in peaks]
        rows.append([record["torch"], record["cuda"], tests, *figures])
    return table(head, rows)


def steps() -> str:
    """How long a step and a whole command take, of the build with most models."""
    lines = (BENCHMARKS / "recordings" / "dry-runs" / "torch-builds.jsonl").read_text().splitlines()
    record = max(map(json.loads, lines), key=lambda record: len(record["steps"]))
    head = ["model", "step", "whole command, import of torch included", "load"]
    rows: list[list[object]] = [
        [name, f"{1000 * step['step_seconds']:.0f} ms", f"{step['command_seconds']:.1f} s", record["load"]]
        for name, step in record["steps"].items()
    ]
    return table(head, rows)


def histories() -> str:
    """PyTorch's allocator and the model of it, over the steps of the presets; the largest by itself."""
    lines = (BENCHMARKS / "recordings" / "histories" / "null-a100-80gb.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    groups = {"the reference decoder": "plain", "transformers' modules": "huggingface"}
    rows: list[list[object]] = []
    for title, word in groups.items():
        chosen = [record for record in records if record["case"].endswith(f"={word}")]
        if chosen:
            rows.append([f"{len(chosen)} presets, {title}", *_summed(chosen)])
    largest = max(records, key=lambda record: int(record["parameters"]))
    rows.append([f"the largest, {largest['case'].split()[0]}, alone", *_summed([largest])])
    head = ["training steps", "lines", "different", "counters", "different", "largest GiB", "host GiB", "CPU seconds"]
    return table(head, rows)


def _summed(records: list[dict[str, Any]]) -> list[object]:
    return [
        f"{sum(record['lines'] for record in records):,}",
        sum(record["first_difference"] is not None for record in records),
        f"{sum(record['counters'] for record in records):,}",
        sum(len(record["different_counters"]) for record in records),
        format_number(max(record["allocated_bytes"] for record in records), "GiB"),
        format_number(max(record["host_bytes"] for record in records), "GiB"),
        max(record["seconds"] for record in records),
    ]


TABLES: dict[str, Callable[..., str]] = {
    "dry-run-builds": builds,
    "dry-run-commands": commands,
    "dry-run-compiled": compiled,
    "dry-run-drawn-releases": drawn_releases,
    "dry-run-environments": environments,
    "dry-run-histories": histories,
    "dry-run-peaks": peaks,
    "dry-run-programs": programs,
    "dry-run-reasons": reasons,
    "dry-run-steps": steps,
}
