"""`memcalc.toml`, or `[tool.memcalc]` of a pyproject.toml: what `check` checks in a repository, and by what."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from memcalc.checking.amount import parse_amount, parse_budget
from memcalc.checking.finding import PROJECT
from memcalc.checking.policy import Limits, Policy, Rule
from memcalc.errors import InputError
from memcalc.files import read_text
from memcalc.spec.cards import find_card
from memcalc.spec.fields import describe, nearest


class _Limits(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    gpu: str | None = Field(None, description="the card to judge by, in place of a file's own hardware.gpu")
    budget: str | int | None = Field(None, description='the most a GPU may hold: "70GiB", or bytes')
    margin: str | int | None = Field(None, description='what must stay free below card and budget: "5%", "2GiB"')
    max_growth: str | int | None = Field(None, description='how much a peak may grow over the baseline: "1%", "0"')
    set: list[str] = Field([], description='fields to override, as --set does: "data_parallel=8"')


class RuleSettings(_Limits):
    """One rule: limits for some paths."""

    paths: list[str] = Field(min_length=1, description="patterns: * within a folder, ** across folders")


class Settings(_Limits):
    """A settings file."""

    paths: list[str] = Field([], description="files, folders and patterns to check where the command line names none")
    exclude: list[str] = Field([], description="patterns of files that are not taken from folders and patterns")
    rules: list[RuleSettings] = Field([], description="limits for some paths, over those above; a later rule wins")
    baseline: str | None = Field(None, description="the JSON of an earlier check, to compare with")
    jobs: int | None = Field(None, ge=1, description="processes; default: one a core where there is enough to do")


def read_policy(path: Path) -> Policy | None:
    """The policy of a settings file; None for a pyproject.toml that holds none.

    Raises:
        InputError: it cannot be read, or is wrong.
    """
    table = _table(path)
    return None if table is None else _policy(table, path)


def _table(path: Path) -> Mapping[str, Any] | None:
    """The settings as plain data; None for a pyproject.toml that holds none."""
    try:
        data: Any = tomllib.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise InputError(f"it is no TOML in UTF-8: {error}.", "Correct it.", path.name) from None
    if path.name != PROJECT:
        return data  # type: ignore[no-any-return]  # a TOML document is a table
    tools = data.get("tool")
    found = tools.get("memcalc") if isinstance(tools, dict) else None
    if found is not None and not isinstance(found, dict):
        raise InputError(f"tool.memcalc is {describe(found)}, not a table.", "Write [tool.memcalc].", path.name)
    return found


def _policy(table: Mapping[str, Any], path: Path) -> Policy:
    label = f"{path.name}: tool.memcalc" if path.name == PROJECT else path.name
    try:
        settings = Settings.model_validate(table)
    except ValidationError as error:
        raise _in_our_words(error, label) from None
    folder = path.resolve().parent
    rules = tuple(
        Rule(tuple(rule.paths), _limits(rule, f"{label}: rules[{number}]"))
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
            find_card(said.gpu)
        place = f"{label}: set"
        limits = Limits(said.gpu, budget, amounts["margin"], amounts["max_growth"], tuple(said.set)).with_card()
    except InputError as error:
        raise InputError(error.problem, error.remedy, place) from None
    return limits


_RULES = {
    "missing": ("is missing", "A rule says which paths it is for."),
    "list_type": ("is not a list", 'Write a list of texts, such as ["configs/**"].'),
    "string_type": ("is not a text", "Write it in quotation marks."),
    "int_type": ("is not a whole number", "Write digits only."),
    "greater_than_equal": ("is too small", "Write at least 1."),
    "too_short": ("is empty", "A rule says which paths it is for."),
    "model_type": ("is not a table", "Write each rule below a line [[rules]]."),
}


def _in_our_words(error: ValidationError, label: str) -> InputError:
    finding = error.errors(include_url=False)[0]
    parts = [part for part in finding["loc"] if part not in ("str", "int")]  # the branches of a union
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).removeprefix(".")
    name = str(parts[-1])
    if finding["type"] == "extra_forbidden":
        known: Iterable[str] = (RuleSettings if "rules" in parts else Settings).model_fields
        close = nearest(name, sorted(known))
        remedy = f"Did you mean {close}?" if close else f"Known are {', '.join(known)}."
        return InputError(f"there is no setting {name}.", remedy, f"{label}: {place}")
    rule, remedy = _RULES.get(finding["type"], ("cannot stand there", "See docs/guides/checking.md."))
    value = "" if finding["type"] == "missing" else f" = {describe(finding['input'])}"
    return InputError(f"{name}{value} {rule}.", remedy, f"{label}: {place}")
