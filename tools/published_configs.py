"""Generate docs/reports/published-files.md from what benchmarks/published_configs.py recorded."""

from __future__ import annotations

import json
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

from tools.markdown import table

RECORD = Path(__file__).resolve().parents[1] / "benchmarks" / "recordings" / "published-configs.json"
SHOWN = 2  # files of each framework, in full
LISTED = 8  # names of fields in a cell
REASON = 160  # characters of a message
MEGATRONS = ("NVIDIA/Megatron-LM", "bigscience-workshop/bigscience")  # their rejected scripts name no format

Facts = dict[str, Any]


def facts() -> list[Facts]:
    """What was recorded of each file."""
    found: list[Facts] = json.loads(RECORD.read_text())
    return found


def read() -> list[Facts]:
    """The files with their fields in lists, framework by framework."""
    return sorted((file for file in facts() if file["framework"]), key=lambda file: str(file["framework"]))


def summary() -> str:
    """How many files, in two sentences."""
    files = facts()
    known = read()
    plain = sum(not file["refused"] and not file["given"] for file in known)
    given = sum(not file["refused"] and bool(file["given"]) for file in known)
    repositories = {file["repository"] for file in files}
    frameworks = {file["framework"] for file in known}
    return (
        f"{len(files)} published files of {len(repositories)} repositories and {len(frameworks)} formats were read: "
        f"{plain} are estimated unchanged, {given} with `--set` for values that they do not contain, and "
        f"{len(files) - plain - given} are rejected with a message.\n"
    )


def scripts_summary() -> str:
    """How many of the files are scripts that launch another program than Megatron-LM, with each answer."""
    found = [file for file in facts() if file["path"].endswith(".sh") and file["framework"] != "Megatron-LM"]
    scripts = [file for file in found if file["repository"] not in MEGATRONS]
    answered = [file for file in scripts if not file["refused"]]
    plain = sum(not file["given"] for file in answered)
    bounds = sum(bool(held(file)) for file in answered)
    loops = sum("training loop of its own" in str(file["refused"]) for file in scripts)
    refused = len(scripts) - len(answered)
    return (
        f"{len(scripts)} of the files are scripts that launch a program of Hugging Face's libraries or LLaMA-Factory, "
        f"of {len({file['repository'] for file in scripts})} repositories: {plain} are estimated unchanged, "
        f"{len(answered) - plain} with `--set`. {bounds} of these use a feature that needs memory and is not modelled. "
        f"{refused} are rejected: {loops} start a training loop of their own, {refused - loops} name a file that the "
        "repository does not contain.\n"
    )


def repositories_table() -> str:
    """One line for each framework and repository."""

    def line(name: tuple[str, str, str], files: list[Facts]) -> list[object]:
        framework, repository, commit = name
        lists = ("mapped", "no_effect", "not_modelled", "unknown")
        return [
            framework,
            f"[{repository}](https://github.com/{repository}/tree/{commit}) `{commit[:8]}`",
            len(files),
            sum(not file["refused"] and not file["given"] for file in files),
            sum(not file["refused"] and bool(file["given"]) for file in files),
            sum(bool(file["refused"]) for file in files),
            *(len({field for file in files for field in file[name]}) for name in lists),
        ]

    def place(file: Facts) -> tuple[str, str, str]:
        return file["framework"], file["repository"], file["commit"]

    heads = "format,repository and commit,files,estimated,estimated with --set,rejected,fields mapped,no effect"
    return table(
        [*heads.split(","), "not modelled", "unknown"],
        [line(name, list(files)) for name, files in groupby(sorted(read(), key=place), key=place)],
    )


def files_table() -> str:
    """Those files of each framework that say most, field by field."""
    rows = []
    for framework, group in groupby(read(), key=lambda file: file["framework"]):
        ordered = sorted(group, key=lambda file: (-len(file["mapped"]), file["path"]))
        for file in ordered[:SHOWN]:
            link = f"https://github.com/{file['repository']}/blob/{file['commit']}/{file['path']}"
            lists = ("mapped", "no_effect", "not_modelled", "unknown", "missing")
            rows.append([framework, f"[{Path(file['path']).name}]({link})", *(names(file[name]) for name in lists)])
    return table(["format", "file", "mapped", "no effect", "not modelled", "unknown", "missing"], rows)


def sized() -> list[Facts]:
    """Return the files that can be estimated, unchanged or with values for the fields that they omit."""
    return [file for file in read() if not file["refused"]]


def held(file: Facts) -> list[str]:
    """Return the features of a file that need memory and are not modelled."""
    return [what for what, holds_memory, _ in file["limits"] if holds_memory]


def limits_summary() -> str:
    """How many files are answered "cannot say" unless what is modelled is too much already, in two sentences."""
    files, without = sized(), [file for file in sized() if not held(file)]
    more = [file for file in without if file["limits"]]
    copies = sum(any(least for _, _, least in file["limits"]) for file in files)
    share = f"{len(files) - len(without)} ({1 - len(without) / len(files):.0%})"
    return (
        f"Of the {len(files)} estimated files, {share} use a feature that needs memory and is not modelled; for "
        f"{copies} of these a lower bound of that memory is known. {len(more)} others use only features that are "
        "counted too high, or an evaluation that needs less than the training step.\n"
    )


def limits_table() -> str:
    """By framework, the files with only a lower bound as a result, and the features that they use."""
    rows = []
    for framework, group in groupby(sized(), key=lambda file: str(file["framework"])):
        files = list(group)
        reasons = Counter(what for file in files for what in held(file))
        told = [f"{what} ({count})" for what, count in sorted(reasons.items(), key=lambda item: (-item[1], item[0]))]
        rows.append((framework, len(files), sum(bool(held(file)) for file in files), ", ".join(told) or "-"))
    total = ("all", sum(row[1] for row in rows), sum(row[2] for row in rows), "")
    heads = ["format", "files estimated", "CANNOT SAY", "features that need memory and are not modelled (files)"]
    return table(heads, [*rows, total])


def refusals_table() -> str:
    """Why files are refused, the most frequent reason first."""
    reasons = Counter(str(file["refused"]).partition(": ")[2] for file in facts() if file["refused"])
    return table(["files", "message"], [[count, cut(reason)] for reason, count in reasons.most_common()])


def names(fields: list[str]) -> str:
    """Names for a cell: the first ones, and how many more."""
    more = len(fields) - LISTED
    shown = ", ".join(f"`{field}`" for field in fields[:LISTED])
    return f"{shown} and {more} more" if more > 0 else shown or "-"


def cut(text: str) -> str:
    """A message for a cell."""
    text = text if len(text) <= REASON else f"{text[:REASON]}..."
    return f"`` {text.replace('|', '/')} ``"


TABLES = {
    "published-summary": summary,
    "published-scripts": scripts_summary,
    "published-repositories": repositories_table,
    "published-files": files_table,
    "published-limits": limits_table,
    "published-limits-summary": limits_summary,
    "published-refusals": refusals_table,
}
