"""Settings of `check`: `memcalc.toml`, or `[tool.memcalc]` of pyproject.toml."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from memcalc.checking.amount import parse_amount, parse_budget
from memcalc.checking.policy import Limits, PathRule, Policy
from memcalc.checking.settings_lookup import PROJECT
from memcalc.errors import InputError
from memcalc.files import read_text
from memcalc.spec.fields import describe, nearest
from memcalc.spec.hardware.gpus import find_gpu


class _Limits(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    gpu: str | None = Field(None, description="the GPU to check against, in place of hardware.gpu of the file")
    budget: str | int | None = Field(None, description='memory limit per GPU: "70GiB", or bytes')
    margin: str | int | None = Field(None, description='memory to keep free below GPU and budget: "5%", "2GiB"')
    max_growth: str | int | None = Field(None, description='how much a peak may grow over the baseline: "1%", "0"')
    set: list[str] = Field([], description='fields to override, as --set does: "data_parallel=8"')


class RuleSettings(_Limits):
    """One rule: limits for some paths."""

    paths: list[str] = Field(min_length=1, description="patterns: * within a directory, ** across directories")


class CheckSettings(_Limits):
    """A settings file."""

    paths: list[str] = Field([], description="files, directories and patterns to check if the command line names none")
    exclude: list[str] = Field([], description="patterns of files to omit from directories and patterns")
    rules: list[RuleSettings] = Field(
        [], description="limits for some paths, which override those above; the last rule that matches applies"
    )
    baseline: str | None = Field(None, description="the JSON of an earlier check, to compare with")
    jobs: int | None = Field(None, ge=1, description="processes; default: one per core if there is enough to do")


def read_policy(path: Path) -> Policy | None:
    """Return the policy of a settings file; None for a pyproject.toml without one.

    Raises:
        InputError: the file cannot be read, or is invalid.
    """
    table = _table(path)
    return None if table is None else _policy(table, path)


def _shown(path: Path) -> str:
    """Return the path as messages name it: the file name alone in the current directory, else the given path."""
    return path.name if path.parent == Path.cwd() else str(path)


def _table(path: Path) -> Mapping[str, Any] | None:
    """Return the settings as plain data; None for a pyproject.toml without any."""
    try:
        data: Any = tomllib.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"this is not TOML in UTF-8: {error}.", "Check quotes and brackets there.", _shown(path)
        ) from None
    if path.name != PROJECT:
        return data  # type: ignore[no-any-return]  # a TOML document is a table
    tools = data.get("tool")
    found = tools.get("memcalc") if isinstance(tools, dict) else None
    if found is not None and not isinstance(found, dict):
        raise InputError(f"tool.memcalc is {describe(found)}, not a table.", "Write [tool.memcalc].", _shown(path))
    return found


def _policy(table: Mapping[str, Any], path: Path) -> Policy:
    label = f"{_shown(path)}: tool.memcalc" if path.name == PROJECT else _shown(path)
    try:
        settings = CheckSettings.model_validate(table)
    except ValidationError as error:
        raise _setting_error(error, label) from None
    folder = path.resolve().parent
    rules = tuple(
        PathRule(tuple(rule.paths), _limits(rule, f"{label}: rules[{number}]"))
        for number, rule in enumerate(settings.rules)
    )
    return Policy(
        "" if folder == Path.cwd() else os.fspath(folder),
        tuple(settings.paths),
        tuple(settings.exclude),
        _limits(settings, label),
        rules,
        settings.baseline,
        settings.jobs,
    )


def _limits(said: _Limits, label: str) -> Limits:
    amounts = {}
    place = label
    try:
        for name in ("margin", "max_growth"):
            place = f"{label}: {name}"
            value = getattr(said, name)
            amounts[name] = None if value is None else parse_amount(str(value))
        place = f"{label}: budget"
        budget = None if said.budget is None else parse_budget(str(said.budget))
        place = f"{label}: gpu"
        if said.gpu is not None:
            find_gpu(said.gpu)
        place = f"{label}: set"
        limits = Limits(said.gpu, budget, amounts["margin"], amounts["max_growth"], tuple(said.set)).with_gpu()
    except InputError as error:
        raise InputError(error.problem, error.remedy, place) from None
    return limits


_RULES = {
    "missing": ("is missing", "A rule needs the paths that it applies to."),
    "list_type": ("is not a list", 'Write a list of strings, such as ["configs/**"].'),
    "string_type": ("is not a string", "Write it in quotation marks."),
    "int_type": ("is not a whole number", "Write digits only."),
    "greater_than_equal": ("is too small", "Write at least 1."),
    "too_short": ("is empty", "A rule needs the paths that it applies to."),
    "model_type": ("is not a table", "Write each rule below a line [[rules]]."),
}


def _setting_error(error: ValidationError, label: str) -> InputError:
    finding = error.errors(include_url=False)[0]
    parts = [part for part in finding["loc"] if part not in ("str", "int")]  # the branches of a union
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).removeprefix(".")
    name = str(parts[-1])
    if finding["type"] == "extra_forbidden":
        known: Iterable[str] = (RuleSettings if "rules" in parts else CheckSettings).model_fields
        close = nearest(name, sorted(known))
        remedy = f"Did you mean {close}?" if close else f"Choose from {', '.join(known)}."
        return InputError(f"unknown setting {name}.", remedy, f"{label}: {place}")
    rule, remedy = _RULES.get(finding["type"], ("is not allowed there", "docs/guides/checking.md lists the settings."))
    value = "" if finding["type"] == "missing" else f" = {describe(finding['input'])}"
    return InputError(f"{name}{value} {rule}.", remedy, f"{label}: {place}")
