"""Integer arithmetic in `$(( ))`."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

_TOKEN = re.compile(r"\s*(\d{1,18}|\*\*|&&|\|\||[<>=!]=|[-+*/%<>()!?:])")
_MOST = 10**18
_LEVELS: tuple[dict[str, Callable[[int, int], int]], ...] = (
    {"||": lambda a, b: int(bool(a) or bool(b))},
    {"&&": lambda a, b: int(bool(a) and bool(b))},
    {"==": operator.eq, "!=": operator.ne},
    {"<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge},
    {"+": operator.add, "-": operator.sub},
    {"*": operator.mul, "/": lambda a, b: abs(a) // abs(b) * (1 if a * b >= 0 else -1), "%": lambda a, b: a % b},
)


def computed(expression: str) -> int | None:
    """Return the value of an expression of numbers; None for anything else."""
    words: list[str] = []
    at = 0
    while at < len(expression.rstrip()):
        match = _TOKEN.match(expression, at)
        if match is None or len(words) > 200:
            return None
        words.append(match[1])
        at = match.end()
    try:
        value, rest = _choice(words)
    except (IndexError, ValueError, ZeroDivisionError, RecursionError):
        return None
    return None if rest else value


def _choice(words: list[str]) -> tuple[int, list[str]]:
    value, rest = _level(words, 0)
    if rest[:1] != ["?"]:
        return value, rest
    first, rest = _choice(rest[1:])
    if rest[:1] != [":"]:
        raise ValueError
    second, rest = _choice(rest[1:])
    return (first if value else second), rest


def _level(words: list[str], level: int) -> tuple[int, list[str]]:
    if level == len(_LEVELS):
        return _power(words)
    value, rest = _level(words, level + 1)
    while rest and rest[0] in _LEVELS[level]:
        right, after = _level(rest[1:], level + 1)
        value, rest = _bounded(int(_LEVELS[level][rest[0]](value, right))), after
    return value, rest


def _power(words: list[str]) -> tuple[int, list[str]]:
    value, rest = _single(words)
    if rest[:1] == ["**"]:
        exponent, rest = _power(rest[1:])
        if not 0 <= exponent <= 63:
            raise ValueError
        value = _bounded(value**exponent)
    return value, rest


def _single(words: list[str]) -> tuple[int, list[str]]:
    if words[0] == "(":
        value, rest = _choice(words[1:])
        if rest[0] != ")":
            raise ValueError
        return value, rest[1:]
    if words[0] in ("-", "+", "!"):
        value, rest = _single(words[1:])
        return (int(not value) if words[0] == "!" else -value if words[0] == "-" else value), rest
    return int(words[0]), words[1:]


def _bounded(value: int) -> int:
    if abs(value) > _MOST:
        raise ValueError
    return value
