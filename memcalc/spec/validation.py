"""Pydantic's findings in our words: the key's place in the file, the value, the rule and the remedy."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from pydantic import ValidationError

from memcalc.errors import InputError
from memcalc.spec.fields import describe
from memcalc.spec.spec import Spec
from memcalc.spec.yaml_source import Path, Source

_RULES = {
    "int_type": ("is not a whole number", "Write digits only, such as 4096."),
    "int_from_float": ("is not a whole number", "Write digits only, such as 4096."),
    "float_type": ("is not a number", "Write a number, such as 0.1."),
    "bool_type": ("is neither true nor false", "Write true or false."),
    "string_type": ("is not a word", "Write a word; put it in quotes if YAML reads it as a number."),
    "tuple_type": ("is not a list", "Write a list in brackets."),
    "model_type": ("is not a block", "Write the block's fields indented below it."),
    "model_attributes_type": ("is not a block", "Write the block's fields indented below it."),
}


def validate(
    raw: dict[str, Any], source: Source, *, missing: bool = True
) -> tuple[Spec | None, list[tuple[Path, InputError]]]:
    """The Spec of completed blocks, or None with what is wrong: the path of each field and the message.

    Args:
        raw: the blocks.
        source: where each value stands.
        missing: whether fields that are missing are told, too.
    """
    try:
        return Spec(**raw), []
    except ValidationError as error:
        findings = error.errors(include_url=False)
    # Of generation the training block is made from the inference block, whose keys the user knows.
    findings = [each for each in findings if each["loc"][0] == "inference"] or findings
    absent = {each["loc"][0] for each in findings if each["type"] == "missing"}
    # What is wrong with a block of which a size is missing follows from that: its first missing size is named.
    first = [each for each in findings if each["type"] == "missing"][: int(missing)]
    findings = [*first, *(each for each in findings if each["loc"][0] not in absent)]
    by_field: dict[Path, list[Any]] = {}
    for each in findings:
        names = tuple(takewhile(lambda part: isinstance(part, str), _location(each)))
        by_field.setdefault(names, []).append(each)
    return None, [(field, _fault(each, source)) for field, each in by_field.items()]


def _fault(findings: list[Any], source: Source) -> InputError:
    """The message of what Pydantic finds of one field."""
    finding = findings[0]
    location = _location(finding)
    if isinstance(finding["input"], list | tuple):  # of a list that is none of the words its member is named
        finding = next((each for each in findings if _location(each)[:-1] == location), finding)
        location = _location(finding)
    return _in_our_words(finding, location, source.where(location))


def _location(finding: Any) -> Path:
    return tuple(part for part in finding["loc"] if not _is_union_branch(part))


def _is_union_branch(part: str | int) -> bool:
    # Pydantic names the branch of a union in the location: "constrained-str", "tuple[...]", "function-after[...]".
    return isinstance(part, str) and ("[" in part or "-" in part)


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
        return InputError(f"{field} = {describe(value)} is not known.", f"Known are {context['expected']}.", where)
    if kind in ("greater_than", "greater_than_equal"):
        bound = f"{'more than' if kind == 'greater_than' else 'at least'} {context.get('gt', context.get('ge'))}"
        return InputError(f"{field} = {describe(value)} is too small.", f"It must be {bound}.", where)
    if kind in ("less_than", "less_than_equal"):
        bound = f"{'less than' if kind == 'less_than' else 'at most'} {context.get('lt', context.get('le'))}"
        return InputError(f"{field} = {describe(value)} is too large.", f"It must be {bound}.", where)
    rule, remedy = _RULES.get(kind, (f"cannot stand there ({finding['msg'].lower()})", "See `memcalc schema`."))
    return InputError(f"{field} = {describe(value)} {rule}.", remedy, where)
