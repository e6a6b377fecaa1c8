"""Patterns of paths, as shells and .gitignore files have them: `*` within a folder, `**` across folders."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_MAGIC = re.compile(r"[*?[]")


def is_pattern(path: str) -> bool:
    """Whether a path is to be expanded: it has a sign of a pattern, and nothing of that name exists."""
    return _MAGIC.search(path) is not None and not _exists(path)


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern means this path, or a folder above it. Both with "/" and relative to the same folder."""
    return _compiled(pattern).fullmatch(path) is not None


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
    except re.error:  # a range from a later to an earlier letter
        return False
    return True


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False
