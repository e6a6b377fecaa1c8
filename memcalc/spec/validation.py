"""Pydantic's validation errors as memcalc's messages: the key's place in the file, value, rule and remedy."""

from __future__ import annotations

import re
from itertools import takewhile
from typing import Any

from pydantic import ValidationError

from memcalc.errors import InputError
from memcalc.spec.fields import describe
from memcalc.spec.spec import Spec
from memcalc.spec.yaml_source import Path, YamlSource

_RULES = {
    "int_type": ("is not a whole number", "Write digits only, such as 8."),
    "int_from_float": ("is not a whole number", "Write digits only, such as 8."),
    "float_type": ("is not a number", "Write a number, such as 0.1."),
    "bool_type": ("is neither true nor false", "Write true or false."),
    "string_type": ("is not a word", "Write a word; put it in quotes if YAML reads it as a number."),
    "tuple_type": ("is not a list", "Write a list in brackets."),
    "model_type": ("is not a block", "Write the block's fields indented below it."),
    "model_attributes_type": ("is not a block", "Write the block's fields indented below it."),
}


def validate(
    raw: dict[str, Any], source: YamlSource, *, missing: bool = True
) -> tuple[Spec | None, list[tuple[Path, InputError]]]:
    """Return the Spec of complete blocks; or None and the path and error of each invalid field.

    Args:
        raw: the blocks.
        source: has the line of each value.
        missing: whether missing fields are reported too.
    """
    try:
        return Spec(**raw), []
    except ValidationError as error:
        findings = error.errors(include_url=False)
    # In generation the training block is derived from the inference block, and only the latter has keys of the user.
    findings = [each for each in findings if each["loc"][0] == "inference"] or findings
    absent = {each["loc"][0] for each in findings if each["type"] == "missing"}
    # Derived sizes are missing or wrong where a stated one is: the stated one is reported. Without one, only the first
    # missing size is.
    wrong = [each for each in findings if each["type"] != "missing" and source.states(_location(each))]
    stated = {each["loc"][0] for each in wrong}
    first = [each for each in findings if each["type"] == "missing" and each["loc"][0] not in stated][: int(missing)]
    findings = [*first, *(each for each in findings if each["loc"][0] not in absent or each in wrong)]
    by_field: dict[Path, list[Any]] = {}
    for each in findings:
        names = tuple(takewhile(lambda part: isinstance(part, str), _location(each)))
        by_field.setdefault(names, []).append(each)
    return None, [(field, _fault(each, source)) for field, each in by_field.items()]


def _fault(findings: list[Any], source: YamlSource) -> InputError:
    """Return the error for Pydantic's findings on one field."""
    finding = findings[0]
    location = _location(finding)
    if isinstance(finding["input"], list | tuple):  # for a list in place of a keyword, report its invalid element
        finding = next((each for each in findings if _location(each)[:-1] == location), finding)
        location = _location(finding)
    return _in_our_words(finding, location, source.where(location))


def _location(finding: Any) -> Path:
    return tuple(part for part in finding["loc"] if not _is_union_branch(part))


def _is_union_branch(part: str | int) -> bool:
    # Pydantic includes the branch of a union in the location: "constrained-str", "tuple[...]", "function-after[...]".
    return isinstance(part, str) and ("[" in part or "-" in part)


def _choice(value: Any, expected: str) -> str:
    """Return the remedy for a value that is none of the expected ones."""
    written = f"'v{value}'"  # a version of PyTorch, which YAML reads as a number
    if written in re.split(r", | or ", expected):
        return f"Write {written}."
    return f"Choose {expected}."


def _in_our_words(finding: Any, location: Path, where: str) -> InputError:
    kind, value, context = finding["type"], finding["input"], finding.get("ctx", {})
    field = str(location[-1]) if location else "the configuration"
    if location and isinstance(location[-1], int):
        field = f"{location[-2]}[{location[-1]}]"
    if kind == "missing":
        return InputError(
            f"{field} is required and cannot be derived from other fields.", f"Add a line `{field}: ...`.", where
        )
    if field == "recompute":
        return InputError(
            f"recompute = {describe(value)} is not a valid value.",
            "Write none, selective, full, every-k (every-2: each second layer) or a list of layers; "
            'a nested list or a range ("4-7") is one checkpoint segment.',
            where,
        )
    if kind == "literal_error":
        return InputError(
            f"{field} = {describe(value)} is not a known value.", _choice(value, context["expected"]), where
        )
    if kind in ("greater_than", "greater_than_equal"):
        bound = f"{'more than' if kind == 'greater_than' else 'at least'} {context.get('gt', context.get('ge'))}"
        return InputError(f"{field} = {describe(value)} is too small.", f"Set {bound}.", where)
    if kind in ("less_than", "less_than_equal"):
        bound = f"{'less than' if kind == 'less_than' else 'at most'} {context.get('lt', context.get('le'))}"
        return InputError(f"{field} = {describe(value)} is too large.", f"Set {bound}.", where)
    rule, remedy = _RULES.get(
        kind, (f"is invalid ({finding['msg'].lower()})", "`memcalc schema` lists the valid values.")
    )
    return InputError(f"{field} = {describe(value)} {rule}.", remedy, where)
