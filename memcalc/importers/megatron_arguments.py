"""The arguments in a shell script or a file of arguments, with its own variables filled in. Nothing is run."""

from __future__ import annotations

import re
from typing import Any

_COMMENT = re.compile(r"(?:^|(?<=\s))#[^\n]*")
_ASSIGNMENT = re.compile(
    r"(?:^|(?<=;))[ \t]*(?:export[ \t]+)?([A-Za-z_]\w{0,60})=(?:\"([^\"\n]*)\"|'([^'\n]*)'|([^\s(;]*))", re.MULTILINE
)
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w{0,60})(?::?-([^}\n]{0,200}))?\}|\$([A-Za-z_]\w{0,60})")
_SUM = re.compile(r"\$\(\(\s*([\d\s*+/()-]{1,100})\s*\)\)")
_PRODUCT = re.compile(r"\s*(\d{1,9})\s*([*/+-])\s*(\d{1,9})\s*")
_ARGUMENT = re.compile(r"(?<![\w-])--([a-z][A-Za-z0-9_-]{1,80})((?:[ \t=\n]+(?!--)[^\s()\"'\\]+)*)")

_QUOTED = re.compile(r"(?<=[\s=])([\"'])([^\s\"'()]{1,200})\1(?=[\s)]|$)")

_MOST_ROUNDS = 8  # of variables that refer to variables


def arguments_of(text: str) -> dict[str, Any]:
    """`--num-layers 96 --bf16` -> {"num-layers": 96, "bf16": True}; the last of several is taken.

    Variables of the script itself are filled in, and products of two numbers; what is given on its command line or made
    by other programs stays as it stands.
    """
    plain = _COMMENT.sub("", text.replace("\\\n", " "))
    variables: dict[str, str] = {}
    for match in _ASSIGNMENT.finditer(plain):
        variables[match[1]] = next((part for part in match.groups()[1:] if part is not None), "")
    variables = {name: _filled(text, variables) for name, text in variables.items()}
    found: dict[str, Any] = {}
    for match in _ARGUMENT.finditer(_QUOTED.sub(r"\2", _filled(plain, variables))):
        words = match[2].replace("=", " ").split()
        program = next((number for number, word in enumerate(words) if word.endswith(".py")), len(words))
        words = words[:program]  # torchrun --nnodes 2 pretrain_gpt.py
        name = match[1].replace("_", "-")
        found[name] = True if not words else _value(words[0]) if len(words) == 1 else [_value(word) for word in words]
    return found


def _filled(text: str, variables: dict[str, str]) -> str:
    for _ in range(_MOST_ROUNDS):
        before = text
        text = _VARIABLE.sub(lambda match: _substitute(match, variables), text)
        text = _SUM.sub(lambda match: _product(match[1], match[0]), text)
        if text == before or len(text) > 1_000_000:
            break
    return text


def _substitute(match: re.Match[str], variables: dict[str, str]) -> str:
    name = match[1] or match[3]
    if name in variables and f"${name}" not in variables[name] and f"${{{name}" not in variables[name]:
        return variables[name]
    return match[2] if match[2] is not None else match[0]


def _product(expression: str, otherwise: str) -> str:
    parts = _PRODUCT.fullmatch(expression)
    if parts is None:
        return otherwise
    a, b = int(parts[1]), int(parts[3])
    if parts[2] == "/" and b == 0:
        return otherwise
    return str({"*": a * b, "+": a + b, "-": a - b, "/": a // b if b else 0}[parts[2]])


def _value(word: str) -> Any:
    word = word.strip(",;")
    if re.fullmatch(r"\d{1,15}", word):
        return int(word)
    if re.fullmatch(r"\d{0,9}\.\d{1,12}", word):
        return float(word)
    return word
