"""Path patterns of shells and .gitignore: `*` within a directory, `**` across directories, `{a,b}`."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_MAGIC = re.compile(r"[*?[]")
_BRACES = re.compile(r"\{([^{}]*,[^{}]*)\}")  # the innermost braces
_MOST_ALTERNATIVES = 1_000  # of one pattern; a pattern with more is not expanded


def is_pattern(path: str) -> bool:
    """Return whether a path is a pattern: it has a wildcard, and no such file exists."""
    return _MAGIC.search(path) is not None and not exists(path)


def matches(pattern: str, path: str) -> bool:
    """Return whether a pattern matches a path or a directory above it. Both use "/" and the same base directory."""
    return any(_compiled(each).fullmatch(path) is not None for each in alternatives(pattern))


@cache
def alternatives(pattern: str) -> tuple[str, ...]:
    """Return the expansions of `configs/{a,b}.yaml`, as a shell does, without duplicates."""
    found: dict[str, None] = {}
    waiting = [pattern]
    while waiting:
        each = waiting.pop()
        braces = _BRACES.search(each)
        if braces is None:
            found[each] = None
            continue
        waiting += [each[: braces.start()] + word + each[braces.end() :] for word in reversed(braces[1].split(","))]
        if len(found) + len(waiting) > _MOST_ALTERNATIVES:
            return (pattern,)
    return tuple(found)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    pieces = re.findall(r"\*\*/|\*\*|\*|\?|\[[^\]/]+\]|[^*?[]+|\[", pattern.removeprefix("./").rstrip("/"))
    return re.compile("".join(map(_translated, pieces)) + r"(?:/.*)?", re.DOTALL)


def _translated(piece: str) -> str:
    wild = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    if piece in wild:
        return wild[piece]
    if len(piece) > 1 and piece[0] == "[":
        inner = re.sub(r"([\\\[^&~|])", r"\\\1", piece[1:-1])
        signs = f"[^{inner[1:]}]" if inner[0] == "!" and len(inner) > 1 else f"[{inner}]"
        return signs if _compiles(signs) else re.escape(piece)
    return re.escape(piece)


def _compiles(expression: str) -> bool:
    try:
        re.compile(expression)
    except re.error:  # a range in descending order
        return False
    return True


def exists(path: str) -> bool:
    """Return whether a file or directory exists; False for an invalid name."""
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False
